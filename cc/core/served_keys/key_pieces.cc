#include "cc/core/served_keys/key_pieces.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/catch_all.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/merged_keys.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/memory/raw_array.h"
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

// Returns the index of the piece that owns the vocabulary of a piece.
size_t OwnerOf(const std::vector<KeyPiece>& pieces, size_t p) {
  return pieces[p].is_owner() ? p : static_cast<size_t>(pieces[p].owner);
}

// The keys that one vocabulary counts in a step.
struct CountedKeys {
  // The pieces that use the vocabulary. The owner is the first piece.
  std::vector<size_t> sharing;
  std::vector<int64_t> keys;
  // For each piece in `sharing`, the index in `keys` of each use of a key.
  // Empty if the uses are the first values of `keys`.
  std::vector<RawArray<uint32_t>> places;
  // Row of each key in `keys`.
  std::vector<int64_t> rows;
  AdmittedKeys admitted;
};

// Returns the counted keys of each piece. The elements of pieces that do not
// own a vocabulary are empty.
std::vector<CountedKeys> CountKeys(const std::vector<KeyPiece>& pieces,
                                   const std::vector<KeyPieceStep>& steps) {
  std::vector<CountedKeys> counted(pieces.size());
  for (size_t p = 0; p < pieces.size(); ++p) {
    if (pieces[p].is_owner()) counted[p].sharing.push_back(p);
  }
  for (size_t p = 0; p < pieces.size(); ++p) {
    if (!pieces[p].is_owner()) counted[pieces[p].owner].sharing.push_back(p);
  }
  for (CountedKeys& one : counted) {
    std::vector<std::vector<int64_t>> uses;
    for (const size_t p : one.sharing) uses.push_back(Expand(*steps[p].keys));
    if (uses.size() < 2) {
      if (!uses.empty()) one.keys = std::move(uses[0]);
      one.places.resize(uses.size());
    } else {
      MergedKeys merged =
          MergeKeys(std::vector<Span<const int64_t>>(uses.begin(), uses.end()));
      one.keys = std::move(merged.keys);
      one.places = std::move(merged.places);
    }
    one.rows.resize(one.keys.size());
  }
  return counted;
}

// Sets the rows of the keys of a piece, which is `counted.sharing[j]`.
void SetRows(const CountedKeys& counted, size_t j, const KeyPiece& piece,
             KeyPieceStep* step) {
  const RawArray<uint32_t>& places = counted.places[j];
  int64_t use = 0;
  for (size_t i = 0; i < step->rows.size(); ++i) {
    const int64_t place = places.size() > 0 ? places[use] : use;
    step->rows[i] = PlaceOf(piece, counted.rows[place]);
    use += step->keys->times[i];
  }
  if (piece.is_owner()) return;
  for (const NewKey& one : counted.admitted.new_keys) {
    step->new_rows.push_back(PlaceOf(piece, one.row));
  }
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
  std::vector<CountedKeys> counted = CountKeys(pieces, *steps);
  for (size_t p = 0; p < num_pieces; ++p) {
    KeyPieceStep& one = (*steps)[p];
    one.rows.resize(one.keys->keys.size());
    one.new_rows.clear();
    if (pieces[p].is_owner()) continue;
    one.new_rows.reserve(counted[pieces[p].owner].keys.size());
  }
  const auto take_back = [&](size_t num_done) {
    for (size_t done = 0; done < num_done; ++done) {
      if (!pieces[done].is_owner()) continue;
      counted[done].admitted.take_back((*steps)[done].state);
    }
  };
  std::vector<VocabularyStep> numbers(num_pieces);
  for (size_t p = 0; p < num_pieces; ++p) {
    if (!pieces[p].is_owner()) continue;
    const KeyPieceStep& one = (*steps)[p];
    VocabularyStep& step = numbers[p];
    step.number = one.last_step + 1;
    step.oldest_in_flight = static_cast<int32_t>(
        std::max<int64_t>(step.number - one.oldest_age, 0));
    step.keeps_old = keeps_old;
    const Status status = AdmitKeys(
        pieces[p].layout, pieces[p].policy, step, counted[p].keys, parallel_for,
        one.state, Span<int64_t>(counted[p].rows), &counted[p].admitted);
    if (status.ok()) continue;
    take_back(p);
    return Status(status.code(),
                  status.message() + " (table '" + pieces[p].table + "')");
  }
  for (size_t p = 0; p < num_pieces; ++p) {
    const KeyPieceStep& one = (*steps)[p];
    if (!one.before_first_rows) continue;
    const AdmittedKeys& admitted = counted[OwnerOf(pieces, p)].admitted;
    const Status status =
        CatchAll([&] { return one.before_first_rows(admitted.new_keys); });
    if (status.ok()) continue;
    take_back(num_pieces);
    return status;
  }
  for (size_t p = 0; p < num_pieces; ++p) {
    const AdmittedKeys& admitted = counted[OwnerOf(pieces, p)].admitted;
    WriteFirstRows((*steps)[p].first_rows, admitted.new_keys, parallel_for);
    (*steps)[p].counts = counted[p].admitted.counts;
    for (size_t j = 0; j < counted[p].sharing.size(); ++j) {
      const size_t other = counted[p].sharing[j];
      SetRows(counted[p], j, pieces[other], &(*steps)[other]);
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
