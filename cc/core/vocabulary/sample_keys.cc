#include "cc/core/vocabulary/sample_keys.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/rows/row_partition.h"

namespace layoutmap {
namespace {

// Maximum number of buckets in a block. Sampling reads all weights once to sum
// the weights of each block, and again the weights of the blocks that contain a
// drawn key.
constexpr int64_t kBlockBuckets = 64;
constexpr int64_t kNanosecondsPerKey = 20;
constexpr int64_t kNanosecondsPerBlock = kBlockBuckets * kKeysPerBucket / 2;

// Consecutive lanes of one shard.
struct Block {
  const int64_t* keys;
  const int32_t* last_step;
  const int32_t* count;
  int64_t num_lanes;
  // Row of the first lane in the vocabulary.
  int64_t first_row;
};

std::vector<Block> BlocksOf(const CountedKeys& counted) {
  const RowPartition& partition = *counted.keys.partition;
  std::vector<Block> blocks;
  int64_t first_row = counted.first_bucket * kKeysPerBucket;
  for (int32_t s = 0; s < partition.num_shards(); ++s) {
    const int64_t num_lanes = partition.shard_size(s) * kKeysPerBucket;
    constexpr int64_t kBlockLanes = kBlockBuckets * kKeysPerBucket;
    for (int64_t lane = 0; lane < num_lanes; lane += kBlockLanes) {
      blocks.push_back(
          {counted.keys.shards[s] + lane, counted.last_step.shards[s] + lane,
           counted.count.shards[s] + lane,
           std::min(kBlockLanes, num_lanes - lane), first_row + lane});
    }
    first_row += num_lanes;
  }
  return blocks;
}

// Returns the weight of a lane. The functions are called in loops, so the
// choice between them is made outside of the loops.
struct UniformWeight {
  int64_t operator()(const Block& block, int64_t lane) const {
    return block.keys[lane] != kEmptyKey;
  }
};

struct CountWeight {
  int64_t operator()(const Block& block, int64_t lane) const {
    // A key without uses must also have a positive probability. Otherwise, its
    // correction in a sampled softmax would be infinite.
    return block.keys[lane] == kEmptyKey ? 0 : std::max(block.count[lane], 1);
  }
};

struct DecayedCountWeight {
  int64_t operator()(const Block& block, int64_t lane) const {
    if (block.keys[lane] == kEmptyKey) return 0;
    const int32_t count = DecayedCount(*policy, block.count[lane],
                                       int64_t{step} - block.last_step[lane]);
    return std::max(count, 1);
  }
  const VocabularyPolicy* policy;
  int32_t step;
};

// Draws integers from [0, total), which all have the same probability, by the
// method of Lemire (arXiv:1805.10941).
class Draws {
 public:
  Draws(const uint64_t (&seed)[2], uint64_t total)
      : state_(MixBits(MixBits(seed[0]) ^ seed[1])),
        total_(total),
        num_rejected_((0 - total) % total) {}

  int64_t Next() {
    for (;;) {
      state_ += 0x9E3779B97F4A7C15u;
      const auto product =
          static_cast<unsigned __int128>(MixBits(state_)) * total_;
      if (static_cast<uint64_t>(product) >= num_rejected_) {
        return static_cast<int64_t>(product >> 64);
      }
    }
  }

 private:
  uint64_t state_;
  const uint64_t total_, num_rejected_;
};

// A drawn position in the sequence of all weights, and the index of its result.
struct Drawn {
  int64_t position;
  int64_t index;
};

template <typename Weight>
int64_t Sample(const std::vector<Block>& blocks, const Weight& weight,
               const uint64_t (&seed)[2], const ParallelFor& parallel_for,
               Span<int64_t> keys, Span<int64_t> rows, Span<int64_t> weights) {
  const int64_t num_blocks = blocks.size();
  // ends[b] is the sum of the weights of the blocks before block b.
  std::vector<int64_t> ends(num_blocks + 1);
  parallel_for(num_blocks, kNanosecondsPerBlock,
               [&](int64_t begin, int64_t end) {
                 for (int64_t b = begin; b < end; ++b) {
                   int64_t sum = 0;
                   for (int64_t lane = 0; lane < blocks[b].num_lanes; ++lane) {
                     sum += weight(blocks[b], lane);
                   }
                   ends[b + 1] = sum;
                 }
               });
  for (int64_t b = 0; b < num_blocks; ++b) ends[b + 1] += ends[b];
  const int64_t total = ends.back();
  if (total == 0) return 0;
  RawArray<Drawn> drawn(keys.size());
  Draws draws(seed, static_cast<uint64_t>(total));
  for (int64_t i = 0; i < keys.size(); ++i) drawn[i] = {draws.Next(), i};
  // The draws of a block are found in one pass over the block.
  std::sort(
      drawn.data(), drawn.data() + keys.size(),
      [](const Drawn& a, const Drawn& b) { return a.position < b.position; });
  parallel_for(
      keys.size(), kNanosecondsPerBlock, [&](int64_t begin, int64_t end) {
        int64_t b = -1, lane = 0, sum = 0;
        for (int64_t i = begin; i < end; ++i) {
          const Drawn& one = drawn[i];
          if (b < 0 || one.position >= ends[b + 1]) {
            b = std::upper_bound(ends.begin(), ends.end(), one.position) -
                ends.begin() - 1;
            lane = 0;
            sum = ends[b] + weight(blocks[b], 0);
          }
          while (one.position >= sum) sum += weight(blocks[b], ++lane);
          keys[one.index] = blocks[b].keys[lane];
          rows[one.index] = blocks[b].first_row + lane;
          weights[one.index] = weight(blocks[b], lane);
        }
      });
  return total;
}

}  // namespace

void CountKeys(const BucketLayout& layout, const CountedKeys& counted,
               Span<const int64_t> keys, const ParallelFor& parallel_for,
               Span<int64_t> counts) {
  const int64_t first = counted.first_bucket;
  const int64_t end = first + counted.keys.partition->num_rows();
  parallel_for(
      keys.size(), kNanosecondsPerKey, [&](int64_t key_begin, int64_t key_end) {
        counted.keys.partition->WithLocate([&](auto locate) {
          const auto lane_of = [&](const auto& view, int64_t bucket) {
            const RowOwner owner = locate(bucket - first);
            return view.shards[owner.shard] + owner.local_row * kKeysPerBucket;
          };
          int64_t num_probes = 0;
          for (int64_t i = key_begin; i < key_end; ++i) {
            counts[i] = 0;
            const int64_t bucket = layout.BucketOf(keys[i]);
            if (keys[i] == kEmptyKey || bucket < first || bucket >= end) {
              continue;
            }
            const int64_t row = FindRow(
                layout, [&](int64_t b) { return lane_of(counted.keys, b); },
                bucket, keys[i], &num_probes);
            if (row == kNoRow) continue;
            const int64_t found = row / kKeysPerBucket;
            const int64_t lane = row % kKeysPerBucket;
            const int32_t last_step = lane_of(counted.last_step, found)[lane];
            counts[i] = DecayedCount(counted.policy,
                                     lane_of(counted.count, found)[lane],
                                     int64_t{counted.step} - last_step);
          }
        });
      });
}

int64_t SampleKeys(const CountedKeys& counted, SampleBy by,
                   const uint64_t (&seed)[2], const ParallelFor& parallel_for,
                   Span<int64_t> keys, Span<int64_t> rows,
                   Span<int64_t> weights) {
  const std::vector<Block> blocks = BlocksOf(counted);
  const auto sample = [&](const auto& weight) {
    return Sample(blocks, weight, seed, parallel_for, keys, rows, weights);
  };
  if (by == SampleBy::kUniform) return sample(UniformWeight());
  if (counted.policy.half_life_steps == 0) return sample(CountWeight());
  return sample(DecayedCountWeight{&counted.policy, counted.step});
}

}  // namespace layoutmap
