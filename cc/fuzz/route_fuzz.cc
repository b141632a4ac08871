// Fuzzes offsets and ids. The target checks that they are rejected, or that the
// route maps each id to its row.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/route.h"
#include "cc/core/rows/row_partition.h"
#include "cc/fuzz/input_reader.h"

namespace layoutmap {
namespace {

std::vector<int64_t> TakeOffsets(InputReader* input) {
  const int64_t num_shards = input->Below(8);
  if (input->Below(8) == 0) {
    return input->MostlyBelow<int64_t>(num_shards, 100);
  }
  std::vector<int64_t> offsets = {0};
  for (int64_t shard = 0; shard < num_shards; ++shard) {
    offsets.push_back(offsets.back() + input->Below(9));
  }
  return offsets;
}

// Returns the offsets of the placements div and mod. The blocks have equal
// sizes, except that the first blocks can have one more row.
std::vector<int64_t> EvenOffsets(int64_t num_rows, int64_t num_shards) {
  std::vector<int64_t> offsets = {0};
  for (int64_t s = 0; s < num_shards; ++s) {
    offsets.push_back(offsets.back() + num_rows / num_shards +
                      (s < num_rows % num_shards));
  }
  return offsets;
}

template <typename Tid>
void CheckRoute(const RowPartition& partition, const std::vector<Tid>& ids,
                bool unique) {
  const bool inside = std::all_of(ids.begin(), ids.end(), [&](Tid id) {
    return id >= 0 && id < partition.num_rows();
  });
  Route<Tid> route;
  const Status status =
      RouteIds(partition, Span<const Tid>(ids), unique, &route);
  FUZZ_CHECK(status.ok() == inside);
  if (!inside) {
    FUZZ_CHECK(!status.message().empty());
    return;
  }
  const int64_t num_ids = static_cast<int64_t>(ids.size());
  const int64_t num_routed = static_cast<int64_t>(route.local_rows.size());
  FUZZ_CHECK(unique ? num_routed <= num_ids : num_routed == num_ids);
  FUZZ_CHECK(static_cast<int32_t>(route.splits.size()) ==
             partition.num_shards() + 1);
  FUZZ_CHECK(route.splits.front() == 0 && route.splits.back() == num_routed);
  FUZZ_CHECK(static_cast<int64_t>(route.permutation.size()) == num_routed);
  FUZZ_CHECK(static_cast<int64_t>(route.inverse.size()) == num_ids);
  for (int32_t shard = 0; shard < partition.num_shards(); ++shard) {
    for (int64_t k = route.splits[shard]; k < route.splits[shard + 1]; ++k) {
      const int32_t place = route.permutation[k];
      FUZZ_CHECK(place >= 0 && place < num_ids);
      FUZZ_CHECK(partition.GlobalRow({shard, route.local_rows[k]}) ==
                 ids[place]);
      FUZZ_CHECK(route.inverse[place] == k);
      if (k == route.splits[shard]) continue;
      FUZZ_CHECK(unique ? route.local_rows[k - 1] < route.local_rows[k]
                        : route.permutation[k - 1] < place);
    }
  }
  for (int64_t i = 0; i < num_ids; ++i) {
    FUZZ_CHECK(route.inverse[i] >= 0 && route.inverse[i] < num_routed);
    const int32_t first = route.permutation[route.inverse[i]];
    FUZZ_CHECK(first <= i && ids[first] == ids[i]);
  }
}

}  // namespace
}  // namespace layoutmap

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using layoutmap::Placement;
  layoutmap::InputReader input(data, size);
  const Placement placement = static_cast<Placement>(input.Below(3));
  const bool unique = input.Below(2) == 1;
  std::vector<int64_t> offsets = layoutmap::TakeOffsets(&input);
  // The placements div and mod require even blocks, and random blocks are
  // rarely even. In most cases, the target therefore uses even blocks.
  if (offsets.size() > 1 && input.Below(4) != 0) {
    offsets = layoutmap::EvenOffsets(input.Below(60), offsets.size() - 1);
  }
  layoutmap::RowPartition partition;
  const layoutmap::Status made =
      layoutmap::RowPartition::Make(placement, offsets, &partition);
  if (!made.ok()) {
    FUZZ_CHECK(!made.message().empty());
    return 0;
  }
  const int64_t num_ids = input.Below(40);
  if (input.Below(2) == 0) {
    layoutmap::CheckRoute(
        partition, input.MostlyBelow<int32_t>(num_ids, partition.num_rows()),
        unique);
  } else {
    layoutmap::CheckRoute(
        partition, input.MostlyBelow<int64_t>(num_ids, partition.num_rows()),
        unique);
  }
  return 0;
}
