// Fuzzes calls on a vocabulary. The target checks that keys and rows map
// one-to-one, that counts are consistent, that rows in flight are not assigned
// to other keys, and that rejected calls change nothing.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/evict_keys.h"
#include "cc/core/vocabulary/move_keys.h"
#include "cc/core/vocabulary/write_keys.h"
#include "cc/fuzz/input_reader.h"

namespace layoutmap {
namespace {

class Fuzzed {
 public:
  explicit Fuzzed(InputReader* input) {
    policy_.admission = static_cast<Admission>(input->Below(3));
    policy_.min_count = static_cast<int32_t>(input->MostlyBelow(4));
    policy_.admitted_of_2_32 = input->Below(3) * (int64_t{1} << 31);
    policy_.eviction = static_cast<Eviction>(input->Below(3));
    policy_.half_life_steps = static_cast<int32_t>(input->MostlyBelow(3));
    policy_.ttl_steps = static_cast<int32_t>(input->MostlyBelow(4));
    policy_.fails_when_full = input->Below(2) == 1;
    int64_t num_buckets;
    FUZZ_CHECK(
        BucketLayout::NumBucketsFor(1 + input->Below(90), &num_buckets).ok());
    FUZZ_CHECK(BucketLayout::Make(num_buckets, &layout_).ok());
    const int64_t cut = input->MostlyBelow(num_buckets) % (num_buckets + 1);
    const std::vector<int64_t> offsets = {0, std::abs(cut), num_buckets};
    FUZZ_CHECK(
        RowPartition::Make(Placement::kOffsets, offsets, &partition_).ok());
    keys_.assign(layout_.num_rows(), kEmptyKey);
    last_step_.assign(layout_.num_rows(), 0);
    count_.assign(layout_.num_rows(), 0);
    const int64_t first = partition_.shard_size(0) * kKeysPerBucket;
    state_.keys = {&partition_, {keys_.data(), keys_.data() + first}, 8};
    state_.last_step = {
        &partition_, {last_step_.data(), last_step_.data() + first}, 8};
    state_.count = {&partition_, {count_.data(), count_.data() + first}, 8};
    sketch_.assign(
        2 * SegmentSketch::NumCells(layout_) * layout_.num_segments(), 0);
    seen_.assign(layout_.num_segments(), 0);
    state_.sketch = sketch_;
    state_.seen = seen_;
  }

  void Admit(InputReader* input, int32_t step) {
    std::vector<int64_t> keys =
        input->MostlyBelow<int64_t>(input->Below(50), 100);
    std::vector<int64_t> pinned =
        input->MostlyBelow<int64_t>(input->Below(4), layout_.num_rows());
    std::sort(pinned.begin(), pinned.end());
    const VocabularyStep now = {
        step, step - static_cast<int32_t>(input->Below(4)), pinned};
    const std::vector<int64_t> old_keys = keys_;
    const std::vector<int32_t> old_step = last_step_, old_count = count_;
    const std::vector<uint8_t> old_sketch = sketch_;
    std::vector<int64_t> rows(keys.size());
    AdmittedKeys admitted;
    const Status status = AdmitKeys(layout_, policy_, now, keys, SerialFor,
                                    state_, rows, &admitted);
    if (!status.ok()) {
      FUZZ_CHECK(!status.message().empty());
      FUZZ_CHECK(keys_ == old_keys && last_step_ == old_step &&
                 count_ == old_count && sketch_ == old_sketch);
      return;
    }
    for (int64_t r = 0; r < layout_.num_rows(); ++r) {
      const bool in_use = old_keys[r] != kEmptyKey &&
                          (old_step[r] >= now.oldest_in_flight ||
                           std::binary_search(pinned.begin(), pinned.end(), r));
      FUZZ_CHECK(!in_use || keys_[r] == old_keys[r]);
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      FUZZ_CHECK(rows[i] == kNoRow ||
                 (keys_[rows[i]] == keys[i] && last_step_[rows[i]] == step));
    }
    for (const NewKey& one : admitted.new_keys) {
      FUZZ_CHECK(keys_[one.row] == one.key && old_keys[one.row] == one.evicted);
    }
    const VocabularyCounts& counts = admitted.counts;
    FUZZ_CHECK(counts.num_admitted ==
               static_cast<int64_t>(admitted.new_keys.size()));
    FUZZ_CHECK(counts.num_lookups == static_cast<int64_t>(keys.size()));
    FUZZ_CHECK(counts.num_expired <= counts.num_evicted);
    CheckState(keys);
  }

  void Evict(InputReader* input, int32_t step) {
    const std::vector<int64_t> keys =
        input->MostlyBelow<int64_t>(input->Below(9), 100);
    std::vector<KeyOfRow> evicted;
    const std::vector<int64_t> old_keys = keys_;
    const std::vector<int32_t> old_step = last_step_, old_count = count_;
    const Status status =
        EvictKeys(layout_, {step, step, {}}, keys, state_, &evicted);
    FUZZ_CHECK(status.ok() || evicted.empty());
    if (input->Below(3) == 0) {
      TakeBackEvicted(evicted, state_);
      FUZZ_CHECK(keys_ == old_keys && last_step_ == old_step &&
                 count_ == old_count);
    }
    if (input->Below(2) == 1) {
      EvictExpired(layout_, policy_, {step, step, {}}, state_, &evicted);
    }
    CheckState(keys);
  }

  void Write(InputReader* input, int32_t step) {
    const std::vector<int64_t> keys =
        input->MostlyBelow<int64_t>(input->Below(50), 100);
    const std::vector<int32_t> last_steps = input->MostlyBelow<int32_t>(
        input->Below(2) == 1 ? static_cast<int64_t>(keys.size()) : 0, step + 1);
    const std::vector<int64_t> old_keys = keys_;
    const std::vector<int32_t> old_step = last_step_, old_count = count_;
    std::vector<int64_t> rows(keys.size());
    WrittenKeys written;
    const Status status = WriteKeys(layout_, {keys, last_steps, {}}, step,
                                    state_, rows, &written);
    if (!status.ok()) {
      FUZZ_CHECK(!status.message().empty());
      FUZZ_CHECK(keys_ == old_keys && last_step_ == old_step &&
                 count_ == old_count);
      return;
    }
    for (int64_t r = 0; r < layout_.num_rows(); ++r) {
      FUZZ_CHECK(old_keys[r] == kEmptyKey || keys_[r] == old_keys[r]);
      FUZZ_CHECK(last_step_[r] >= old_step[r]);
    }
    for (const NewKey& one : written.new_keys) {
      FUZZ_CHECK(keys_[one.row] == one.key && old_keys[one.row] == kEmptyKey);
    }
    FUZZ_CHECK(std::count(rows.begin(), rows.end(), kNoRow) ==
               written.num_full);
    CheckState(keys);
  }

  void Restore(int32_t step) {
    const std::vector<KeptKey> kept = KeysOfState(layout_, state_);
    std::fill(keys_.begin(), keys_.end(), kEmptyKey);
    std::fill(last_step_.begin(), last_step_.end(), 0);
    std::fill(count_.begin(), count_.end(), 0);
    std::vector<RowMove> moves;
    FUZZ_CHECK(PutKeys(layout_, policy_, step, kept, state_, &moves).ok());
    FUZZ_CHECK(moves.size() <= kept.size());
    CheckState({});
  }

 private:
  void CheckState(const std::vector<int64_t>& keys) {
    std::map<int64_t, int64_t> row_of;
    for (int64_t r = 0; r < layout_.num_rows(); ++r) {
      if (keys_[r] == kEmptyKey) {
        FUZZ_CHECK(last_step_[r] == 0 && count_[r] == 0);
      } else {
        FUZZ_CHECK(row_of.emplace(keys_[r], r).second);
      }
    }
    std::vector<int64_t> rows(keys.size());
    const ShardedView<const int64_t> stored = {
        &partition_, {state_.keys.shards[0], state_.keys.shards[1]}, 8};
    FindKeys(layout_, stored, keys, SerialFor, rows);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto found = row_of.find(keys[i]);
      FUZZ_CHECK(rows[i] == (found == row_of.end() ? kNoRow : found->second));
    }
  }

  VocabularyPolicy policy_;
  BucketLayout layout_;
  RowPartition partition_;
  std::vector<int64_t> keys_;
  std::vector<int32_t> last_step_, count_;
  std::vector<uint8_t> sketch_;
  std::vector<int64_t> seen_;
  VocabularyState state_;
};

}  // namespace
}  // namespace layoutmap

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  layoutmap::InputReader input(data, size);
  layoutmap::Fuzzed fuzzed(&input);
  const int64_t num_calls = input.Below(20);
  for (int32_t step = 1; step <= num_calls; ++step) {
    switch (input.Below(7)) {
      case 0:
        fuzzed.Evict(&input, step);
        break;
      case 1:
        fuzzed.Restore(step);
        break;
      case 2:
        fuzzed.Write(&input, step);
        break;
      default:
        fuzzed.Admit(&input, step);
    }
  }
  return 0;
}
