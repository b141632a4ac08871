#include "cc/core/vocabulary/write_keys.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_queue.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/first_rows.h"

namespace layoutmap {
namespace {

using std::to_string;

// Prefetch distance, in keys or rows.
constexpr int64_t kPlacesAhead = 8;

Status CheckUnique(Span<const int64_t> keys) {
  const RawArray<int64_t> sorted(keys.size());
  std::copy(keys.begin(), keys.end(), sorted.data());
  int64_t* const end = sorted.data() + keys.size();
  std::sort(sorted.data(), end);
  if (!keys.empty() && sorted[0] == kEmptyKey) {
    return InvalidArgument("A key must not be " + to_string(kEmptyKey) +
                           ", which marks rows without a key");
  }
  const int64_t* const twice = std::adjacent_find(sorted.data(), end);
  if (twice == end) return Status();
  return InvalidArgument("Keys must be unique. Received twice: " +
                         to_string(*twice));
}

// Returns an error unless there is one value in [0, highest] for each key, or
// no value.
Status CheckValues(const char* name, Span<const int32_t> values,
                   int64_t num_keys, int32_t highest) {
  if (values.size() != 0 && values.size() != num_keys) {
    return InvalidArgument(
        "`" + std::string(name) + "` must have one value for each of " +
        to_string(num_keys) + " keys. Received: " + to_string(values.size()));
  }
  for (const int32_t value : values) {
    if (value >= 0 && value <= highest) continue;
    return InvalidArgument("`" + std::string(name) + "` must be in [0, " +
                           to_string(highest) +
                           "]. Received: " + to_string(value));
  }
  return Status();
}

// Copies `values` to the rows of a table or of a slot variable.
template <typename T>
void CopyToRows(const ShardedView<T>& table, Span<const int64_t> rows,
                const T* values, const ParallelFor& parallel_for) {
  const int64_t dim = table.dim;
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
  parallel_for(rows.size(), 20 + bytes / 8, [&](int64_t begin, int64_t end) {
    table.WithRow([&](auto row_of) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kPlacesAhead < end && rows[i + kPlacesAhead] != kNoRow) {
          PrefetchRow(row_of(rows[i + kPlacesAhead]), bytes);
        }
        if (rows[i] == kNoRow) continue;
        std::copy_n(values + i * dim, dim, row_of(rows[i]));
      }
    });
  });
}

}  // namespace

Status WriteKeys(const BucketLayout& layout, const KeysToWrite& written,
                 int32_t step, const VocabularyState& state, Span<int64_t> rows,
                 WrittenKeys* result) {
  const Span<const int64_t> keys = written.keys;
  LM_RETURN_IF_ERROR(CheckUnique(keys));
  LM_RETURN_IF_ERROR(
      CheckValues("last_steps", written.last_steps, keys.size(), step));
  LM_RETURN_IF_ERROR(
      CheckValues("counts", written.counts, keys.size(), INT32_MAX));
  *result = WrittenKeys();
  // The memory is allocated before the state changes, because an allocation can
  // fail.
  result->new_keys.reserve(keys.size());
  const bool has_steps = !written.last_steps.empty();
  const bool has_counts = !written.counts.empty();
  WithBuckets(state, [&](const auto& buckets) {
    const auto keys_of = [&](int64_t b) { return buckets.keys(b); };
    int64_t num_probes = 0;
    for (int64_t i = 0; i < keys.size(); ++i) {
      if (i + kPlacesAhead < keys.size()) {
        __builtin_prefetch(keys_of(layout.BucketOf(keys[i + kPlacesAhead])));
      }
      const int64_t first = layout.BucketOf(keys[i]);
      int64_t row = FindRow(layout, keys_of, first, keys[i], &num_probes);
      const bool is_new = row == kNoRow;
      if (is_new) {
        // The first lane without a key is the lane with the key kEmptyKey.
        row = FindRow(layout, keys_of, first, kEmptyKey, &num_probes);
      }
      rows[i] = row;
      if (row == kNoRow) {
        ++result->num_full;
        continue;
      }
      const auto bucket = buckets.at(row / kKeysPerBucket);
      const int64_t lane = row % kKeysPerBucket;
      if (is_new) {
        result->new_keys.push_back({row, keys[i], kEmptyKey});
        bucket.keys[lane] = keys[i];
        bucket.last_step[lane] = has_steps ? written.last_steps[i] : step;
        bucket.count[lane] = has_counts ? written.counts[i] : 1;
        continue;
      }
      if (has_steps) {
        bucket.last_step[lane] =
            std::max(bucket.last_step[lane], written.last_steps[i]);
      }
      if (has_counts) bucket.count[lane] = written.counts[i];
    }
  });
  return Status();
}

void WriteRowValues(const FirstRows& table, const WrittenKeys& written,
                    Span<const int64_t> rows, const RowValues& values,
                    const ParallelFor& parallel_for) {
  WriteFirstRows(
      table,
      {written.new_keys.data(), static_cast<int64_t>(written.new_keys.size())},
      parallel_for);
  if (values.rows != nullptr) {
    if (table.row_type == RowType::kFloat32) {
      CopyToRows(table.table, rows, static_cast<const float*>(values.rows),
                 parallel_for);
    } else {
      CopyToRows(table.half_table, rows,
                 static_cast<const uint16_t*>(values.rows), parallel_for);
    }
  }
  for (size_t j = 0; j < values.slots.size(); ++j) {
    if (values.slots[j] == nullptr) continue;
    CopyToRows(table.slots[j], rows, values.slots[j], parallel_for);
  }
}

}  // namespace layoutmap
