#include "cc/core/served_keys/key_pieces.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/catch_all.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/first_rows.h"

namespace layoutmap {

using std::to_string;

namespace {

// Returns a list that contains each key as often as the key is used.
// `AdmitKeys` counts this list.
std::vector<int64_t> Expand(const PieceKeys& requested) {
  int64_t num_uses = 0;
  for (const uint32_t times : requested.times) num_uses += times;
  std::vector<int64_t> uses;
  uses.reserve(num_uses);
  for (size_t i = 0; i < requested.keys.size(); ++i) {
    uses.insert(uses.end(), requested.times[i], requested.keys[i]);
  }
  return uses;
}

uint32_t PlaceOf(const KeyPiece& piece, int64_t row) {
  return row == kNoRow ? kNoPlace
                       : static_cast<uint32_t>(row - piece.first_row());
}

}  // namespace

Status CheckKeyPiece(const KeyPiece& piece) {
  const int64_t size = piece.layout.buckets_per_segment();
  const int64_t end = piece.first_bucket + piece.num_buckets;
  if (piece.first_bucket >= 0 && piece.num_buckets > 0 &&
      end <= piece.layout.num_buckets() && piece.first_bucket % size == 0 &&
      end % size == 0) {
    return Status();
  }
  return InvalidArgument(
      "A shard of a vocabulary on a server must consist of complete segments "
      "of " +
      to_string(size) + " buckets, in a vocabulary of " +
      to_string(piece.layout.num_buckets()) + " buckets. Received: buckets " +
      to_string(piece.first_bucket) + " to " + to_string(end) + " (table '" +
      piece.table + "')");
}

Status PartOf(int64_t size, int64_t first, int64_t count,
              RowPartition* partition) {
  const std::vector<int64_t> offsets = {0, first, first + count, size};
  return RowPartition::Make(Placement::kOffsets, offsets, partition);
}

Status CheckKeysOf(const KeyPiece& piece, Span<const int64_t> keys) {
  for (const int64_t key : keys) {
    const int64_t bucket = piece.layout.BucketOf(key) - piece.first_bucket;
    if (key != kEmptyKey && bucket >= 0 && bucket < piece.num_buckets) continue;
    return InvalidArgument(
        "`request` must have keys of the shards on this server. Received: "
        "key " +
        to_string(key) + " (table '" + piece.table + "')");
  }
  return Status();
}

Status AdmitToPieces(const std::vector<KeyPiece>& pieces,
                     const ParallelFor& parallel_for,
                     std::vector<KeyPieceStep>* steps) {
  const size_t num_pieces = pieces.size();
  bool may_fail = false;
  for (const KeyPiece& piece : pieces) may_fail |= piece.policy.fails_when_full;
  bool keeps_old = may_fail && num_pieces > 1;
  for (const KeyPieceStep& one : *steps) {
    keeps_old |= one.before_first_rows != nullptr;
  }
  // The memory is allocated before the first change of the state, so that a
  // failed allocation leaves the state unchanged.
  std::vector<std::vector<int64_t>> uses(num_pieces), rows(num_pieces);
  std::vector<AdmittedKeys> admitted(num_pieces);
  for (size_t p = 0; p < num_pieces; ++p) {
    uses[p] = Expand(*(*steps)[p].keys);
    rows[p].resize(uses[p].size());
    (*steps)[p].rows.resize((*steps)[p].keys->keys.size());
  }
  const auto take_back = [&](size_t num_done) {
    for (size_t done = 0; done < num_done; ++done) {
      admitted[done].take_back((*steps)[done].state);
    }
  };
  std::vector<VocabularyStep> numbers(num_pieces);
  for (size_t p = 0; p < num_pieces; ++p) {
    const KeyPieceStep& one = (*steps)[p];
    VocabularyStep& step = numbers[p];
    step.number = one.last_step + 1;
    step.oldest_in_flight = static_cast<int32_t>(
        std::max<int64_t>(step.number - one.oldest_age, 0));
    step.keeps_old = keeps_old;
    const Status status = AdmitKeys(pieces[p].layout, pieces[p].policy, step,
                                    uses[p], parallel_for, one.state,
                                    Span<int64_t>(rows[p]), &admitted[p]);
    if (status.ok()) continue;
    take_back(p);
    return Status(status.code(),
                  status.message() + " (table '" + pieces[p].table + "')");
  }
  for (size_t p = 0; p < num_pieces; ++p) {
    const KeyPieceStep& one = (*steps)[p];
    if (!one.before_first_rows) continue;
    const Status status =
        CatchAll([&] { return one.before_first_rows(admitted[p].new_keys); });
    if (status.ok()) continue;
    take_back(num_pieces);
    return status;
  }
  for (size_t p = 0; p < num_pieces; ++p) {
    KeyPieceStep& one = (*steps)[p];
    WriteFirstRows(one.first_rows, admitted[p].new_keys, parallel_for);
    one.counts = admitted[p].counts;
    int64_t use = 0;
    for (size_t i = 0; i < one.rows.size(); ++i) {
      one.rows[i] = PlaceOf(pieces[p], rows[p][use]);
      use += one.keys->times[i];
    }
  }
  return Status();
}

void FindInPieces(const std::vector<KeyPiece>& pieces,
                  const ParallelFor& parallel_for,
                  std::vector<KeyPieceStep>* steps) {
  for (size_t p = 0; p < pieces.size(); ++p) {
    KeyPieceStep& one = (*steps)[p];
    std::vector<int64_t> rows(one.keys->keys.size());
    FindKeys(pieces[p].layout, one.stored, one.keys->keys, parallel_for,
             Span<int64_t>(rows));
    one.rows.clear();
    one.rows.reserve(rows.size());
    for (const int64_t row : rows) one.rows.push_back(PlaceOf(pieces[p], row));
  }
}

void PinInPieces(const std::vector<KeyPiece>& pieces, int64_t age,
                 std::vector<KeyPieceStep>* steps) {
  for (size_t p = 0; p < pieces.size(); ++p) {
    const KeyPieceStep& one = (*steps)[p];
    const int64_t step = one.last_step + 1 - age;
    WithBuckets(one.state, [&](const auto& buckets) {
      for (const uint32_t place : one.rows) {
        if (place == kNoPlace) continue;
        const int64_t row = pieces[p].first_row() + place;
        const auto bucket = buckets.at(row / kKeysPerBucket);
        const int64_t lane = row % kKeysPerBucket;
        const int64_t since = step - bucket.last_step[lane];
        if (since <= 0) continue;
        bucket.count[lane] =
            DecayedCount(pieces[p].policy, bucket.count[lane], since);
        bucket.last_step[lane] = static_cast<int32_t>(step);
      }
    });
  }
}

std::vector<uint32_t> RowsToSend(const KeyPiece& piece,
                                 const KeyPieceStep& step) {
  std::vector<uint32_t> rows;
  rows.reserve(step.rows.size() + 1);
  for (const uint32_t row : step.rows) {
    if (row != kNoPlace) rows.push_back(row);
  }
  std::sort(rows.begin(), rows.end());
  // A message may contain duplicate keys.
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  if (piece.has_unknown_row) {
    rows.push_back(static_cast<uint32_t>(piece.num_buckets * kKeysPerBucket));
  }
  return rows;
}

}  // namespace layoutmap
