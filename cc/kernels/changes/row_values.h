// Copies rows of a table and of its slot variables to the outputs of an op.

#ifndef TF_LAYOUTMAP_KERNELS_CHANGES_ROW_VALUES_H_
#define TF_LAYOUTMAP_KERNELS_CHANGES_ROW_VALUES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

// An output of type `list(type)` whose tensors are written one after the other.
class OutputsInOrder {
 public:
  absl::Status Start(tensorflow::OpKernelContext* ctx, const char* name);

  // Fails unless the next output is of this dtype.
  absl::Status Allocate(tensorflow::DataType dtype,
                        const tensorflow::TensorShape& shape,
                        tensorflow::Tensor** output);
  absl::Status Set(const tensorflow::Tensor& value);
  absl::Status SetVector(Span<const int64_t> values);

  // Fails if there are more outputs than were written.
  absl::Status Finish() const;

 private:
  absl::Status Check(tensorflow::DataType dtype) const;

  std::string name_;
  tensorflow::OpOutputList outputs_;
  int next_ = 0;
};

// Returns the bucket offsets of the shards of an open table. A bucket has 8
// rows; the table has one more row for unknown keys.
std::vector<int64_t> BucketOffsets(const TableSpec& table);

// Copies `rows` of the table, whose shards begin at `first_shard`, and of each
// slot variable; the shards of the slot variables begin at `first_slot`. If
// `rows` is empty, the variables need not be locked.
absl::Status SaveRows(tensorflow::OpKernelContext* ctx,
                      const LockedShards& locked, int first_shard,
                      int first_slot, const TableSpec& table,
                      Span<const int64_t> rows,
                      std::vector<tensorflow::Tensor>* values);
// Copies the same values to the next outputs.
absl::Status CopyRows(tensorflow::OpKernelContext* ctx,
                      const LockedShards& locked, int first_shard,
                      int first_slot, const TableSpec& table,
                      Span<const int64_t> rows, OutputsInOrder* outputs);

// Writes `values`, which `SaveRows` has copied, back to `rows` of the table and
// of its slot variables.
absl::Status RestoreRows(tensorflow::OpKernelContext* ctx, LockedShards* locked,
                         int first_shard, int first_slot,
                         const TableSpec& table, Span<const int64_t> rows,
                         const std::vector<tensorflow::Tensor>& values);

// Copies the lanes `rows` of variables with one row per bucket. The variables
// have the types `dtypes` and begin at `first`. A row after the last bucket
// gets the value in `beyond`, which has one value for each dtype.
absl::Status CopyLanes(tensorflow::OpKernelContext* ctx,
                       const LockedShards& locked, int first,
                       const TableSpec& table,
                       const std::vector<tensorflow::DataType>& dtypes,
                       const std::vector<int64_t>& beyond,
                       Span<const int64_t> rows, OutputsInOrder* outputs);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_CHANGES_ROW_VALUES_H_
