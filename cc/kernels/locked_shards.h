// The shards of one or more tables, held under their variables' locks.

#ifndef TF_LAYOUTMAP_KERNELS_LOCKED_SHARDS_H_
#define TF_LAYOUTMAP_KERNELS_LOCKED_SHARDS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/sharded_view.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

// Refuses a list `input` with more or fewer variables than the tables have;
// `needs` begins the message: "Table 'ads' needs".
absl::Status CheckNumVariables(const std::string& needs, const char* input,
                               int64_t expected, int64_t received);

class LockedShards {
 public:
  enum class Mode { kShared, kExclusive };

  LockedShards() = default;
  LockedShards(const LockedShards&) = delete;
  LockedShards& operator=(const LockedShards&) = delete;
  ~LockedShards();

  // Looks up the variables behind all handles of the input lists `inputs` and
  // locks them in the order of their addresses, each once, so that two ops
  // with the same shards in any order cannot wait for each other.
  absl::Status Lock(tensorflow::OpKernelContext* ctx,
                    const std::vector<const char*>& inputs, Mode mode);

  // Variables [first, first + num_shards) as the rows of a table, refused
  // unless they are initialized, of `dtype` and [shard size, *row_shape].
  // 16-bit rows, of any dtype, are viewed as their bits, uint16_t.
  template <typename T>
  absl::Status View(
      int first, const std::string& table, const RowPartition& partition,
      const tensorflow::TensorShape& row_shape, ShardedView<const T>* view,
      tensorflow::DataType dtype = tensorflow::DataTypeToEnum<T>::value) const;

  // The same for writing. A shard whose value somebody still holds gets a copy
  // of its own first: that reader's tensor must not change under it.
  template <typename T>
  absl::Status MutableView(
      tensorflow::OpKernelContext* ctx, int first, const std::string& table,
      const RowPartition& partition, const tensorflow::TensorShape& row_shape,
      ShardedView<T>* view,
      tensorflow::DataType dtype = tensorflow::DataTypeToEnum<T>::value);

  // The same as bytes, for any dtype that can be copied as such.
  absl::Status ByteView(int first, const std::string& table,
                        const RowPartition& partition,
                        tensorflow::DataType dtype,
                        const tensorflow::TensorShape& row_shape,
                        ShardedView<const char>* view) const;

  // A copy of variable `i`, refused unless it is initialized.
  absl::Status Copy(tensorflow::OpKernelContext* ctx, int i,
                    tensorflow::Tensor* copy) const;

  // An int64 scalar, to read and to write.
  absl::Status MutableCount(tensorflow::OpKernelContext* ctx, int i,
                            const std::string& table, int64_t** count);

  // Of the first variable, whatever it is.
  absl::Status FirstRowShape(const std::string& table,
                             tensorflow::TensorShape* row_shape) const;

  // The rows of variable `i`, one shard of a table.
  absl::Status NumRows(int i, const std::string& table,
                       int64_t* num_rows) const;

  // Of the first variable, once its row shape is known.
  int64_t FirstNumRows() const { return variables_[0]->tensor()->dim_size(0); }

  // Where each variable's value is.
  std::vector<MemoryRange> Memory() const;

  int size() const { return static_cast<int>(variables_.size()); }

 private:
  absl::Status CheckShards(int first, const std::string& table,
                           const RowPartition& partition,
                           tensorflow::DataType dtype,
                           const tensorflow::TensorShape& row_shape) const;
  absl::Status OwnValue(tensorflow::OpKernelContext* ctx, int i);

  // Of checked shards; `dim` values of T are a row.
  template <typename T>
  void Fill(int first, const RowPartition& partition, int64_t dim,
            ShardedView<T>* view) const {
    view->partition = &partition;
    view->dim = dim;
    view->shards.clear();
    for (int s = 0; s < partition.num_shards(); ++s) {
      view->shards.push_back(
          static_cast<T*>(variables_[first + s]->tensor()->data()));
    }
  }

  // TensorFlow has deprecated the name of this type, not what returns it.
  using Mutex = decltype(std::declval<tensorflow::Var>().mu());

  Mode mode_ = Mode::kShared;
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<Mutex> locked_;
};

template <typename T>
absl::Status LockedShards::View(int first, const std::string& table,
                                const RowPartition& partition,
                                const tensorflow::TensorShape& row_shape,
                                ShardedView<const T>* view,
                                tensorflow::DataType dtype) const {
  TF_RETURN_IF_ERROR(CheckShards(first, table, partition, dtype, row_shape));
  Fill(first, partition, row_shape.num_elements(), view);
  return absl::OkStatus();
}

template <typename T>
absl::Status LockedShards::MutableView(tensorflow::OpKernelContext* ctx,
                                       int first, const std::string& table,
                                       const RowPartition& partition,
                                       const tensorflow::TensorShape& row_shape,
                                       ShardedView<T>* view,
                                       tensorflow::DataType dtype) {
  TF_RETURN_IF_ERROR(CheckShards(first, table, partition, dtype, row_shape));
  for (int s = 0; s < partition.num_shards(); ++s) {
    TF_RETURN_IF_ERROR(OwnValue(ctx, first + s));
  }
  Fill(first, partition, row_shape.num_elements(), view);
  return absl::OkStatus();
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_LOCKED_SHARDS_H_
