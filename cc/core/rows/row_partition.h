// Maps the rows of a table to shards and to local rows in the shards.

#ifndef TF_LAYOUTMAP_CORE_ROWS_ROW_PARTITION_H_
#define TF_LAYOUTMAP_CORE_ROWS_ROW_PARTITION_H_

#include <cassert>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// Computes n / d with a multiplication by floor(2^64 / d) + 1. The result is
// exact if the product of n and d is below 2^64. The multiplier exceeds
// 2^64 / d by at most 1, so the quotient exceeds n / d by at most n / 2^64,
// which is less than 1 / d (Granlund and Montgomery, PLDI 1994).
class Divider {
 public:
  Divider() : Divider(1) {}
  explicit Divider(uint64_t d)
      : d_(d), magic_(d > 1 ? ~uint64_t{0} / d + 1 : 0) {}

  uint64_t operator()(uint64_t n) const {
    if (d_ == 1) return n;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(n) * magic_) >>
                                 64);
  }

 private:
  uint64_t d_;
  uint64_t magic_;
};

enum class Placement {
  // Each shard is a contiguous block of rows. The first num_rows % num_shards
  // blocks have one more row than the other blocks.
  kDiv,
  // Row r is in shard r % num_shards.
  kMod,
  // Each shard is a contiguous block of rows. The blocks can have any sizes.
  kOffsets,
};

Status ParsePlacement(const std::string& name, Placement* placement);

struct RowOwner {
  int32_t shard;
  int64_t local_row;
};

// Computes `RowPartition::Locate` for one placement. The object is small, so
// that its members stay in registers. A loop that writes rows through a pointer
// would have to reload the members of a RowPartition for each row.
struct LocateInBlocks {
  RowOwner operator()(int64_t row) const {
    // The code computes both results and selects one of them, because a branch
    // would often be mispredicted for random rows.
    const bool is_long = row < cut;
    const int64_t first = is_long ? 0 : cut;
    const int64_t in_long = static_cast<int64_t>(long_blocks(row));
    const int64_t in_short = static_cast<int64_t>(short_blocks(row - first));
    const int64_t shard = is_long ? in_long : in_short;
    const int64_t size = is_long ? block + 1 : block;
    return {static_cast<int32_t>(shard + (is_long ? 0 : extra)),
            row - first - shard * size};
  }

  // Rows below `cut` are in the first `extra` blocks, which have `block` + 1
  // rows. The other rows are in blocks of `block` rows.
  int64_t cut = 0;
  int64_t extra = 0;
  int64_t block = 0;
  Divider long_blocks;
  Divider short_blocks;
};

// Computes `RowPartition::Locate` for shards of equal size, which requires half
// as many arithmetic operations.
struct LocateInEqualBlocks {
  RowOwner operator()(int64_t row) const {
    const int64_t shard = static_cast<int64_t>(blocks(row));
    return {static_cast<int32_t>(shard), row - shard * block};
  }

  int64_t block = 0;
  Divider blocks;
};

struct LocateRoundRobin {
  RowOwner operator()(int64_t row) const {
    const int64_t local = static_cast<int64_t>(by_shards(row));
    return {static_cast<int32_t>(row - local * num_shards), local};
  }

  int64_t num_shards = 1;
  Divider by_shards;
};

struct LocateByOffsets {
  RowOwner operator()(int64_t row) const {
    // The binary search finds the last non-empty shard that starts at or before
    // `row`. It has no branches that could be mispredicted.
    const int64_t* first = offsets;
    int64_t size = num_shards;
    while (size > 1) {
      const int64_t half = size / 2;
      first = first[half] <= row ? first + half : first;
      size -= half;
    }
    return {static_cast<int32_t>(first - offsets), row - *first};
  }

  const int64_t* offsets;
  int64_t num_shards;
};

class RowPartition {
 public:
  // Creates a partition of one shard without rows.
  RowPartition() : offsets_{0, 0} {}

  // `offsets` are the cumulative shard sizes, [num_shards + 1]. Returns an
  // error if the first offset is not 0, if an offset is below the preceding
  // offset, or if the offsets do not match `placement`.
  static Status Make(Placement placement, Span<const int64_t> offsets,
                     RowPartition* partition);

  Placement placement() const { return placement_; }
  int64_t num_rows() const { return offsets_.back(); }
  int32_t num_shards() const {
    return static_cast<int32_t>(offsets_.size()) - 1;
  }
  int64_t shard_size(int32_t shard) const {
    return offsets_[shard + 1] - offsets_[shard];
  }
  const std::vector<int64_t>& offsets() const { return offsets_; }

  // Returns the shard and local row of `row`, which must be in [0, num_rows()).
  RowOwner Locate(int64_t row) const {
    assert(row >= 0 && row < num_rows());
    RowOwner owner;
    WithLocate([&](auto locate) { owner = locate(row); });
    return owner;
  }

  // Calls `work(locate)`. The function locate(row) returns the same result as
  // `Locate(row)` and is faster in loops.
  template <typename Work>
  void WithLocate(const Work& work) const {
    if (placement_ == Placement::kMod) return work(round_robin_);
    if (placement_ == Placement::kDiv) {
      if (blocks_.extra > 0) return work(blocks_);
      return work(LocateInEqualBlocks{blocks_.block, blocks_.short_blocks});
    }
    return work(LocateByOffsets{offsets_.data(), num_shards()});
  }

  // Calls `work(local_row)`. The function local_row(row, shard) returns the
  // local row of a row whose shard is known.
  template <typename Work>
  void WithLocalRow(const Work& work) const {
    if (placement_ == Placement::kMod) {
      return work([by_shards = round_robin_.by_shards](int64_t row, int32_t) {
        return static_cast<int64_t>(by_shards(row));
      });
    }
    return work([offsets = offsets_.data()](int64_t row, int32_t shard) {
      return row - offsets[shard];
    });
  }

  // Returns the row for which `Locate` returns `owner`.
  int64_t GlobalRow(RowOwner owner) const;

 private:
  Placement placement_ = Placement::kDiv;
  std::vector<int64_t> offsets_;
  LocateInBlocks blocks_;
  LocateRoundRobin round_robin_;
};

// Computes the shard and local row of each id. Returns an error if an id is
// outside the table.
template <typename Tid>
Status AssignPartition(const RowPartition& partition, Span<const Tid> ids,
                       Span<int32_t> shards, Span<Tid> local_rows);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_ROW_PARTITION_H_
