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

// The shapes of the op's inputs determine the type of the feature:
//
//   locations   rank 2, [num_ids, c]   SparseTensor: its indices
//               rank 1, not empty      RaggedTensor: its row_splits
//               rank 1, empty          dense
//
// The activations of a feature have the shape [d0, d1, ...]. The indices of a
// SparseTensor have one column for each of these axes and one additional
// column, along which ids are combined. If d1 exists, a RaggedTensor with d0
// rows is a sequence: id p of row s becomes activation [s, p], and ids after
// the last position are truncated. If it has d0 * d1 * ... rows, each row is
// one activation, as for dense ids.
template <typename Tid>
struct CoreInput {
  int64_t num_columns = 0;  // of sparse indices; 0 if not sparse
  Span<const int64_t> locations;
  Span<const Tid> ids;
  Span<const float> weights;  // if empty, 1 for each id
};

template <typename Tid>
Status MakeCoreIds(const TpuConfig& config, size_t f, Combiner combiner,
                   const CoreInput<Tid>& input, RaggedIds* ids);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CORE_BATCH_H_
