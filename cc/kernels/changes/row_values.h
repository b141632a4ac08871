// Functions that copy rows of a table and of its slot variables to the outputs
// of an op.

#ifndef TF_LAYOUTMAP_KERNELS_CHANGES_ROW_VALUES_H_
#define TF_LAYOUTMAP_KERNELS_CHANGES_ROW_VALUES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/changed_rows.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

// An output of type `list(type)`. Its tensors are written one after the other.
class OutputsInOrder {
 public:
  absl::Status Start(tensorflow::OpKernelContext* ctx, const char* name);

  // Allocates the next output. Returns an error if its dtype is not `dtype`.
  absl::Status Allocate(tensorflow::DataType dtype,
                        const tensorflow::TensorShape& shape,
                        tensorflow::Tensor** output);
  absl::Status Set(const tensorflow::Tensor& value);
  absl::Status SetVector(Span<const int64_t> values);

  // Returns an error if the op has more outputs than were written.
  absl::Status Finish() const;

 private:
  absl::Status Check(tensorflow::DataType dtype) const;

  std::string name_;
  tensorflow::OpOutputList outputs_;
  int next_ = 0;
};

// Returns the bucket offsets of the shards for a table with an open vocabulary.
// A bucket has 8 rows. The table has one additional row for unknown keys.
std::vector<int64_t> BucketOffsets(const TableSpec& table);

// Copies `rows` of a table and of each slot variable. The shards of the table
// begin at the variable `first_shard`, and the shards of the slot variables
// begin at the variable `first_slot`. If `rows` is empty, the variables do not
// need to be locked.
absl::Status SaveRows(tensorflow::OpKernelContext* ctx,
                      const LockedShards& locked, int first_shard,
                      int first_slot, const TableSpec& table,
                      Span<const int64_t> rows,
                      std::vector<tensorflow::Tensor>* values);
// Copies the same values as `SaveRows` to the next outputs.
absl::Status CopyRows(tensorflow::OpKernelContext* ctx,
                      const LockedShards& locked, int first_shard,
                      int first_slot, const TableSpec& table,
                      Span<const int64_t> rows, OutputsInOrder* outputs);

// Restores `rows` of a table and of its slot variables. `values` are the values
// that `SaveRows` has copied.
absl::Status RestoreRows(tensorflow::OpKernelContext* ctx, LockedShards* locked,
                         int first_shard, int first_slot,
                         const TableSpec& table, Span<const int64_t> rows,
                         const std::vector<tensorflow::Tensor>& values);

// Number of vocabulary variables that have one value per row: the keys, the
// last steps and the counts.
constexpr int kNumLaneVariables = 3;

// Copies the values of `rows` from these variables, which have one row per
// bucket. Their first shard is the variable `first`. The row of unknown keys,
// which is after the last bucket, has the empty key, step 0 and count 0.
absl::Status CopyLanes(tensorflow::OpKernelContext* ctx,
                       const LockedShards& locked, int first,
                       const TableSpec& table, Span<const int64_t> rows,
                       OutputsInOrder* outputs);

// Copies the rows that have changed since the call that returned the input
// `watch`, and the rows in the input `also`. The function locks the variables
// in `inputs` at the same time, so that all copies are from the same point in
// time, and calls copy(locked, rows) with the rows of each table. If a copy
// fails, the rows are recorded again, so that the next call returns them.
absl::Status TakeChangedRows(
    tensorflow::OpKernelContext* ctx, const std::vector<const char*>& inputs,
    ChangedRows* changed,
    const std::function<
        absl::Status(const LockedShards& locked,
                     const std::vector<std::vector<int64_t>>& rows)>& copy);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_CHANGES_ROW_VALUES_H_
