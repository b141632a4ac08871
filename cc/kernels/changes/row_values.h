// Rows of a table and of its slot variables, as outputs of an op.

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

// An output of the type `list(type)`, written one after the other.
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

// The buckets of an open table, whose rows count 8 each; one more row is that
// of unknown keys.
std::vector<int64_t> BucketOffsets(const TableSpec& table);

// Copies `rows` of the table, whose shards begin at `first_shard`, then those
// of each slot variable, whose shards begin at `first_slot`. Without rows the
// variables need not be locked.
absl::Status SaveRows(tensorflow::OpKernelContext* ctx,
                      const LockedShards& locked, int first_shard,
                      int first_slot, const TableSpec& table,
                      Span<const int64_t> rows,
                      std::vector<tensorflow::Tensor>* values);
// The same as outputs.
absl::Status CopyRows(tensorflow::OpKernelContext* ctx,
                      const LockedShards& locked, int first_shard,
                      int first_slot, const TableSpec& table,
                      Span<const int64_t> rows, OutputsInOrder* outputs);

// Writes `rows` of the table and of its slot variables back: `values` are what
// `SaveRows` has copied.
absl::Status RestoreRows(tensorflow::OpKernelContext* ctx, LockedShards* locked,
                         int first_shard, int first_slot,
                         const TableSpec& table, Span<const int64_t> rows,
                         const std::vector<tensorflow::Tensor>& values);

// Writes the lanes `rows` of variables by bucket, of `dtypes`, which begin at
// `first`. A row beyond all buckets gets `beyond`, one for each dtype.
absl::Status CopyLanes(tensorflow::OpKernelContext* ctx,
                       const LockedShards& locked, int first,
                       const TableSpec& table,
                       const std::vector<tensorflow::DataType>& dtypes,
                       const std::vector<int64_t>& beyond,
                       Span<const int64_t> rows, OutputsInOrder* outputs);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_CHANGES_ROW_VALUES_H_
