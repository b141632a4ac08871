// A vocabulary that is partitioned over servers. Each shard is a heap
// allocation of its exact size, so that AddressSanitizer detects accesses
// beyond the shard.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_TEST_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_TEST_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/served_keys/key_pieces.h"
#include "gtest/gtest.h"

namespace layoutmap {

constexpr int64_t kCapacity = 256;
constexpr int64_t kDim = 3;
// The partition of the 8 segments over three servers.
inline const std::vector<int64_t> kSegmentSplits = {0, 3, 4, 8};

// A server with one shard of the vocabulary and the rows of this shard.
class Server {
 public:
  Server(const BucketLayout& layout, const VocabularyPolicy& policy,
         int64_t first_segment, int64_t num_segments) {
    const int64_t size = layout.buckets_per_segment();
    piece.table = "words";
    piece.layout = layout;
    piece.first_bucket = first_segment * size;
    piece.num_buckets = num_segments * size;
    piece.policy = policy;
    EXPECT_TRUE(CheckKeyPiece(piece).ok());
    const int64_t lanes = piece.num_buckets * kKeysPerBucket;
    keys.assign(lanes, kEmptyKey);
    last_step.assign(lanes, 0);
    count.assign(lanes, 0);
    rows.assign(lanes * kDim, -1.0f);
    sketch.resize(2 * SegmentSketch::NumCells(layout) * num_segments);
    seen.resize(num_segments);
    EXPECT_TRUE(PartOf(layout.num_buckets(), piece.first_bucket,
                       piece.num_buckets, &bucket_part)
                    .ok());
    EXPECT_TRUE(
        PartOf(layout.num_rows(), piece.first_row(), lanes, &row_part).ok());
    step.state.keys = {&bucket_part, {nullptr, keys.data(), nullptr}, 8};
    step.state.last_step = {
        &bucket_part, {nullptr, last_step.data(), nullptr}, 8};
    step.state.count = {&bucket_part, {nullptr, count.data(), nullptr}, 8};
    if (policy.admission == Admission::kCount) {
      step.state.sketch = sketch;
      step.state.seen = seen;
    }
    step.state.first_segment = first_segment;
    step.state.num_segments = num_segments;
    step.stored = {&bucket_part, {nullptr, keys.data(), nullptr}, 8};
    step.first_rows.values.kind = FirstValues::Kind::kUniform;
    step.first_rows.values.b = 1;
    step.first_rows.table = {&row_part, {nullptr, rows.data(), nullptr}, kDim};
  }
  // Objects cannot be copied, because the step contains views of members.
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  bool Has(int64_t key) const {
    const int64_t bucket = piece.layout.BucketOf(key) - piece.first_bucket;
    return bucket >= 0 && bucket < piece.num_buckets;
  }

  KeyPiece piece;
  KeyPieceStep step;
  PieceKeys requested;
  std::vector<int64_t> keys, seen;
  std::vector<int32_t> last_step, count;
  std::vector<float> rows;
  std::vector<uint8_t> sketch;
  RowPartition bucket_part, row_part;
};

class Servers {
 public:
  explicit Servers(const VocabularyPolicy& policy) {
    int64_t num_buckets;
    EXPECT_TRUE(BucketLayout::NumBucketsFor(kCapacity, &num_buckets).ok());
    EXPECT_TRUE(BucketLayout::Make(num_buckets, &layout).ok());
    EXPECT_EQ(layout.num_segments(), kSegmentSplits.back());
    for (size_t s = 0; s + 1 < kSegmentSplits.size(); ++s) {
      servers.push_back(
          std::make_unique<Server>(layout, policy, kSegmentSplits[s],
                                   kSegmentSplits[s + 1] - kSegmentSplits[s]));
    }
  }

  // Sends each server its keys and the numbers of their uses, in the same way
  // as a worker.
  void Request(const std::vector<int64_t>& keys) {
    for (auto& server : servers) {
      server->requested = {};
      std::map<int64_t, size_t> place_of;
      for (const int64_t key : keys) {
        if (!server->Has(key)) continue;
        const auto [place, is_new] =
            place_of.emplace(key, server->requested.keys.size());
        if (is_new) {
          server->requested.keys.push_back(key);
          server->requested.times.push_back(0);
        }
        ++server->requested.times[place->second];
      }
      EXPECT_TRUE(CheckKeysOf(server->piece, server->requested.keys).ok());
    }
  }

  std::vector<KeyPiece> pieces() const {
    std::vector<KeyPiece> pieces;
    for (const auto& server : servers) pieces.push_back(server->piece);
    return pieces;
  }
  std::vector<KeyPieceStep> steps(int32_t last_step = 0) const {
    std::vector<KeyPieceStep> steps;
    for (const auto& server : servers) {
      steps.push_back(server->step);
      steps.back().keys = &server->requested;
      steps.back().last_step = last_step;
    }
    return steps;
  }

  // Returns the row of each requested key in the full vocabulary.
  std::map<int64_t, int64_t> RowsOf(const std::vector<KeyPieceStep>& steps) {
    std::map<int64_t, int64_t> rows;
    for (size_t s = 0; s < servers.size(); ++s) {
      for (size_t i = 0; i < steps[s].rows.size(); ++i) {
        const uint32_t place = steps[s].rows[i];
        rows[servers[s]->requested.keys[i]] =
            place == kNoPlace ? kNoRow : servers[s]->piece.first_row() + place;
      }
    }
    return rows;
  }

  // Returns the values of all pieces in the order of `TestVocabulary::Bits`.
  std::vector<int64_t> Bits(bool has_sketch) const {
    std::vector<int64_t> bits;
    const auto add = [&](const auto& values) {
      bits.insert(bits.end(), values.begin(), values.end());
    };
    for (const auto& server : servers) add(server->keys);
    for (const auto& server : servers) add(server->last_step);
    for (const auto& server : servers) add(server->count);
    if (!has_sketch) return bits;
    for (const auto& server : servers) add(server->sketch);
    for (const auto& server : servers) add(server->seen);
    return bits;
  }

  BucketLayout layout;
  std::vector<std::unique_ptr<Server>> servers;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_TEST_H_
