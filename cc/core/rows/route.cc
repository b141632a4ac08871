#include "cc/core/rows/route.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/rows/unique_rows.h"

namespace layoutmap {
namespace {

// Workers route chunks of ids in parallel. Slots are ordered by shard, by
// chunk, and by position in the chunk. Within a shard, this is the order of the
// ids, so the chunk boundaries do not affect the result.
constexpr int64_t kMaxChunks = 16;
constexpr int64_t kIdsPerChunk = 2048;
constexpr int64_t kNanosPerId = 2;

template <typename Tid>
RouteView<Tid> MakeRoom(int64_t num_slots, int64_t num_shards,
                        Route<Tid>* route) {
  route->local_rows.resize(num_slots);
  route->splits.resize(num_shards + 1);
  route->permutation.resize(num_slots);
  route->inverse.resize(num_slots);
  return {route->local_rows, route->splits, route->permutation, route->inverse};
}

// Converts the indices in `route` from unique rows to ids. `route` has one slot
// per unique row.
template <typename Tid>
void SpreadOverIds(const UniqueRows& unique, Route<Tid>* route) {
  std::vector<int32_t> inverse(unique.positions.size());
  for (int64_t u = 0; u < unique.size(); ++u) {
    const int32_t slot = route->inverse[u];
    route->permutation[slot] =
        static_cast<int32_t>(unique.positions[unique.splits[u]]);
    for (int64_t k = unique.splits[u]; k < unique.splits[u + 1]; ++k) {
      inverse[unique.positions[k]] = slot;
    }
  }
  route->inverse = std::move(inverse);
}

}  // namespace

template <typename Tid>
Status RouteEachId(const RowPartition& partition, Span<const Tid> ids,
                   const ParallelFor& parallel_for, RouteView<Tid> out) {
  const int64_t n = ids.size();
  if (n > INT32_MAX) {
    return InvalidArgument("One call routes at most 2^31 - 1 ids. Received: " +
                           std::to_string(n));
  }
  const int64_t num_shards = partition.num_shards();
  const int64_t num_rows = partition.num_rows();
  const int64_t num_chunks =
      std::clamp<int64_t>(n / kIdsPerChunk, 1, kMaxChunks);
  auto chunk_begin = [&](int64_t chunk) { return n * chunk / num_chunks; };
  const int64_t cost = kNanosPerId * (n / num_chunks + 1);

  // At first, next[chunk * stride + s] is the number of ids in the chunk that
  // belong to shard s. Later, it is the next slot. There is one unused cache
  // line between the chunks to avoid false sharing.
  const int64_t stride = num_shards + 64 / sizeof(int32_t);
  std::vector<int32_t> next(num_chunks * stride);
  std::vector<char> bad(num_chunks);
  auto for_chunks = [&](const auto& work) {
    parallel_for(num_chunks, cost, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        work(chunk, chunk_begin(chunk), chunk_begin(chunk + 1));
      }
    });
  };
  // If the caller requests `inverse`, it stores the shard of each id until the
  // slot of the id is known.
  const bool has_inverse = out.inverse.size() == n;
  std::unique_ptr<int32_t[]> shards(has_inverse ? nullptr : new int32_t[n]);
  int32_t* const shard_of = has_inverse ? out.inverse.data() : shards.get();
  for_chunks([&](int64_t chunk, int64_t begin, int64_t end) {
    int32_t* const count = &next[chunk * stride];
    partition.WithLocate([&](auto locate) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = ids[i];
        if (IsOutside(row, num_rows)) {
          bad[chunk] = 1;
          return;
        }
        const int32_t shard = locate(row).shard;
        ++count[shard];
        shard_of[i] = shard;
      }
    });
  });
  if (std::find(bad.begin(), bad.end(), 1) != bad.end()) {
    return CheckIds(ids, num_rows);
  }
  int32_t slot = 0;
  for (int64_t s = 0; s < num_shards; ++s) {
    out.splits[s] = slot;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      slot += std::exchange(next[chunk * stride + s], slot);
    }
  }
  out.splits[num_shards] = slot;
  for_chunks([&](int64_t chunk, int64_t begin, int64_t end) {
    int32_t* const next_slot = &next[chunk * stride];
    Tid* const local_rows = out.local_rows.data();
    int32_t* const permutation = out.permutation.data();
    const Tid* const in = ids.data();
    partition.WithLocalRow([=](auto local_row) {
      for (int64_t i = begin; i < end; ++i) {
        const int32_t shard = shard_of[i];
        const int32_t k = next_slot[shard]++;
        local_rows[k] = static_cast<Tid>(local_row(in[i], shard));
        permutation[k] = static_cast<int32_t>(i);
        if (has_inverse) shard_of[i] = k;
      }
    });
  });
  return Status();
}

template <typename Tid>
Status RouteIds(const RowPartition& partition, Span<const Tid> ids, bool unique,
                Route<Tid>* route) {
  if (!unique) {
    return RouteEachId(partition, ids, SerialFor,
                       MakeRoom(ids.size(), partition.num_shards(), route));
  }
  LM_RETURN_IF_ERROR(CheckIds(ids, partition.num_rows()));
  const std::vector<uint32_t> rows(ids.begin(), ids.end());
  const Span<const uint32_t> segment(rows);
  const UniqueRows distinct = FindUniqueRows(
      Span<const Span<const uint32_t>>(&segment, 1), partition.num_rows());
  const std::vector<Tid> distinct_ids(distinct.rows.begin(),
                                      distinct.rows.end());
  LM_RETURN_IF_ERROR(RouteEachId<Tid>(
      partition, distinct_ids, SerialFor,
      MakeRoom(distinct.size(), partition.num_shards(), route)));
  SpreadOverIds(distinct, route);
  return Status();
}

#define LM_INSTANTIATE(Tid)                                                 \
  template Status RouteEachId<Tid>(const RowPartition&, Span<const Tid>,    \
                                   const ParallelFor&, RouteView<Tid>);     \
  template Status RouteIds<Tid>(const RowPartition&, Span<const Tid>, bool, \
                                Route<Tid>*)

LM_INSTANTIATE(int32_t);
LM_INSTANTIATE(int64_t);

#undef LM_INSTANTIATE

}  // namespace layoutmap
