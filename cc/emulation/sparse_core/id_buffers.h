// Writes the sorted ids of all SparseCores of a chip to buffers of fixed sizes,
// as TensorFlow's op ConvertToSparseCoreCsrWrappedCooTensor does.

#ifndef TF_LAYOUTMAP_EMULATION_SPARSE_CORE_ID_BUFFERS_H_
#define TF_LAYOUTMAP_EMULATION_SPARSE_CORE_ID_BUFFERS_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// Value of the positions of a buffer that have no id.
constexpr int32_t kSparseCorePadding = std::numeric_limits<int32_t>::max();

// The sizes of parts of the buffers are multiples of this number.
constexpr int64_t kSparseCoreAlignment = 8;

// Ids are split into at most this number of minibatches.
constexpr int64_t kMaxMinibatches = 64;

// The sorted ids of one SparseCore. `counts` is [num_shards + 1], or
// [num_shards * kMaxMinibatches + 1] with minibatches.
struct CoreIds {
  Span<const int32_t> rows;
  Span<const int32_t> cols;
  Span<const float> gains;
  Span<const int32_t> counts;
};

struct BufferSettings {
  int64_t num_shards = 1;
  int64_t samples_per_core = 1;
  int64_t max_minibatches = 1;
  int64_t max_ids_per_chip_per_sample = 1;
  bool allow_id_dropping = false;
};

// Sizes of the buffers of a chip.
struct BufferSizes {
  int64_t num_row_pointers = 0;
  int64_t num_ids = 0;
};

// The buffers. `ids_unpadded_size` and `row_pointers_unpadded_size` are the
// sizes of the parts that contain ids.
struct IdBuffers {
  Span<int32_t> row_pointers;
  Span<int32_t> rows;
  Span<int32_t> cols;
  Span<float> gains;
  int32_t row_pointers_unpadded_size = 0;
  int32_t ids_unpadded_size = 0;
  int32_t num_minibatches = 0;
  int64_t num_dropped_ids = 0;
};

Status SizeOfBuffers(const BufferSettings& settings, int64_t num_cores,
                     BufferSizes* sizes);

// Fills the buffers. SizeOfBuffers returns their sizes. The bits of `splits`
// are the ends of minibatches.
Status FillBuffers(const BufferSettings& settings, int64_t splits,
                   const std::vector<CoreIds>& cores, IdBuffers* buffers);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_SPARSE_CORE_ID_BUFFERS_H_
