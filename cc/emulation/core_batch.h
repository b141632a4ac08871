// One feature of one core as TensorFlow's enqueue op brings it, into RaggedIds.

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

// The op says by shapes alone what its input was:
//
//   locations   rank 2, [num_ids, c]   SparseTensor: its indices
//               rank 1, not empty      RaggedTensor: its row_splits
//               rank 1, empty          dense
//
// A feature's activations have the shape [d0, d1, ...]. The indices of a
// SparseTensor have one column for each of these axes and one more, along which
// ids are combined. A RaggedTensor with d0 rows, where there is a d1, is a
// sequence: id p of row s becomes activation [s, p], and what is behind the
// last one is cut off. With d0 * d1 * ... rows each is one activation, as it is
// with dense ids.
template <typename Tid>
struct CoreInput {
  int64_t num_columns = 0;  // of sparse indices; 0 if it is none
  Span<const int64_t> locations;
  Span<const Tid> ids;
  Span<const float> weights;  // empty: 1 each
};

template <typename Tid>
Status MakeCoreIds(const TpuConfig& config, size_t f, Combiner combiner,
                   const CoreInput<Tid>& input, RaggedIds* ids);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CORE_BATCH_H_
