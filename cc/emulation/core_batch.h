// Converts one feature of one core from the inputs of TensorFlow's enqueue op
// to RaggedIds.

#ifndef TF_LAYOUTMAP_EMULATION_CORE_BATCH_H_
#define TF_LAYOUTMAP_EMULATION_CORE_BATCH_H_

#include <cstddef>
#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/emulation/config/tpu_config.h"

namespace layoutmap {

// The inputs of one feature. The shape of the input `locations` determines the
// type of the feature:
//
//   * If `locations` has the shape [num_ids, c], it contains the indices of a
//     SparseTensor.
//   * If `locations` has rank 1 and is not empty, it contains the row_splits of
//     a RaggedTensor.
//   * If `locations` has rank 1 and is empty, the ids are dense.
//
// Let [d0, d1, ...] be the shape of a feature's activations. The indices of a
// SparseTensor have one column for each axis of this shape, and one additional
// column along which ids are combined. A RaggedTensor with d0 rows is a
// sequence if the shape has an axis d1. Id p of row s then becomes activation
// [s, p], and ids after the last position are truncated. If the RaggedTensor
// has d0 * d1 * ... rows, each row becomes one activation. The ids of a dense
// tensor are treated in the same way.
template <typename Tid>
struct CoreInput {
  // Number of columns of the sparse indices. 0 if the ids are not sparse.
  int64_t num_columns = 0;
  Span<const int64_t> locations;
  Span<const Tid> ids;
  Span<const float> weights;  // If empty, all weights are 1.
};

template <typename Tid>
Status MakeCoreIds(const TpuConfig& config, size_t f, Combiner combiner,
                   const CoreInput<Tid>& input, RaggedIds* ids);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CORE_BATCH_H_
