#include "cc/core/rows/row_partition.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"

namespace layoutmap {
namespace {

// The largest supported number of rows. In a larger table, the product of a row
// and a block size could exceed 2^64, and `Divider` would not be exact.
constexpr int64_t kMaxNumRows = int64_t{1} << 32;

// Returns the offset of a shard in an even partition, in which the first
// `num_rows % num_shards` shards have one row more than the other shards. The
// div and mod placements have the same offsets.
int64_t EvenOffset(int64_t num_rows, int64_t num_shards, int64_t shard) {
  return shard * (num_rows / num_shards) +
         std::min(shard, num_rows % num_shards);
}

const char* Name(Placement placement) {
  switch (placement) {
    case Placement::kDiv:
      return "div";
    case Placement::kMod:
      return "mod";
    case Placement::kOffsets:
      return "offsets";
  }
  return "unknown";
}

}  // namespace

Status ParsePlacement(const std::string& name, Placement* placement) {
  for (Placement p : {Placement::kDiv, Placement::kMod, Placement::kOffsets}) {
    if (name == Name(p)) {
      *placement = p;
      return Status();
    }
  }
  return InvalidArgument(
      "`placement` must be one of div, mod, offsets. Received: " + name);
}

Status RowPartition::Make(Placement placement, Span<const int64_t> offsets,
                          RowPartition* partition) {
  if (offsets.size() < 2 || offsets[0] != 0) {
    return InvalidArgument(
        "`offsets` must have num_shards + 1 >= 2 values and start with 0. "
        "Received: " +
        std::to_string(offsets.size()) + " values" +
        (offsets.empty() ? "" : ", the first " + std::to_string(offsets[0])));
  }
  const int64_t num_shards = offsets.size() - 1;
  const int64_t num_rows = offsets[num_shards];
  if (num_rows > kMaxNumRows || num_shards > INT32_MAX) {
    return InvalidArgument("A table has at most 2^32 rows. Received: " +
                           std::to_string(num_rows));
  }
  for (int64_t s = 0; s < num_shards; ++s) {
    if (offsets[s + 1] < offsets[s]) {
      return InvalidArgument("`offsets` must not decrease. Received: " +
                             std::to_string(offsets[s]) + ", then " +
                             std::to_string(offsets[s + 1]) + " (shard " +
                             std::to_string(s) + ")");
    }
    if (placement != Placement::kOffsets &&
        offsets[s] != EvenOffset(num_rows, num_shards, s)) {
      return InvalidArgument(
          std::string("`offsets` of placement ") + Name(placement) +
          " must split the rows evenly. Received: shard " + std::to_string(s) +
          " starts at " + std::to_string(offsets[s]) + ", expected " +
          std::to_string(EvenOffset(num_rows, num_shards, s)));
    }
  }
  partition->placement_ = placement;
  partition->offsets_.assign(offsets.begin(), offsets.end());
  const int64_t block = num_rows / num_shards;
  const int64_t extra = num_rows % num_shards;
  // If there are fewer rows than shards, the block size is 0. Every row is then
  // below `cut`, so the second divider is not used.
  partition->blocks_ = {extra * (block + 1), extra, block, Divider(block + 1),
                        Divider(std::max<int64_t>(block, 1))};
  partition->round_robin_ = {num_shards, Divider(num_shards)};
  return Status();
}

int64_t RowPartition::GlobalRow(RowOwner owner) const {
  if (placement_ == Placement::kMod) {
    return owner.local_row * num_shards() + owner.shard;
  }
  return offsets_[owner.shard] + owner.local_row;
}

template <typename Tid>
Status AssignPartition(const RowPartition& partition, Span<const Tid> ids,
                       Span<int32_t> shards, Span<Tid> local_rows) {
  assert(shards.size() == ids.size() && local_rows.size() == ids.size());
  LM_RETURN_IF_ERROR(CheckIds(ids, partition.num_rows()));
  partition.WithLocate([&](auto locate) {
    for (int64_t i = 0; i < ids.size(); ++i) {
      const RowOwner owner = locate(ids[i]);
      shards[i] = owner.shard;
      local_rows[i] = static_cast<Tid>(owner.local_row);
    }
  });
  return Status();
}

template Status AssignPartition<int32_t>(const RowPartition&,
                                         Span<const int32_t>, Span<int32_t>,
                                         Span<int32_t>);
template Status AssignPartition<int64_t>(const RowPartition&,
                                         Span<const int64_t>, Span<int32_t>,
                                         Span<int64_t>);

}  // namespace layoutmap
