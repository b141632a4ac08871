// The shards of one or more tables. The locks of their variables are held.

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

// Returns an error if the list `input` does not have `expected` variables.
// `needs` is the start of the error message, for example "Table 'ads' needs".
absl::Status CheckNumVariables(const std::string& needs, const char* input,
                               int64_t expected, int64_t received);

// Variables that are locked together. The object keeps a reference to each
// variable. An assignment or a restored checkpoint replaces the value of a
// variable, and not the variable itself, so the list stays valid.
class VariableList {
 public:
  // Looks up the variables of all handles in the input list `input`, and
  // appends them.
  absl::Status Add(tensorflow::OpKernelContext* ctx, const char* input);
  // Appends the variables [first, last) of another list.
  void Add(const VariableList& other, int first, int last);

  // Determines the order in which the variables are locked. Call this method
  // after the last `Add`. If `is_written`, returns an error if the list
  // contains a variable twice.
  absl::Status SetLockOrder(bool is_written);

  int size() const { return static_cast<int>(variables_.size()); }

 private:
  friend class LockedShards;

  // The code does not use the name of this type, because TensorFlow has
  // deprecated the name. The function that returns the type is not deprecated.
  using Mutex = decltype(std::declval<tensorflow::Var>().mu());

  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<Mutex> mutexes_;
};

class LockedShards {
 public:
  enum class Mode { kShared, kExclusive };

  LockedShards() = default;
  LockedShards(const LockedShards&) = delete;
  LockedShards& operator=(const LockedShards&) = delete;
  ~LockedShards();

  // Looks up the variables of all handles in the input lists `inputs`. Locks
  // each variable once. The variables are locked in the order of their
  // addresses, to prevent a deadlock between two ops with the same shards.
  absl::Status Lock(tensorflow::OpKernelContext* ctx,
                    const std::vector<const char*>& inputs, Mode mode);

  // Locks the variables of a list, which must exist as long as this object.
  // `VariableList::SetLockOrder` must have succeeded.
  void Lock(const VariableList& list, Mode mode);

  // Returns a view of the variables [first, first + num_shards) as the rows of
  // a table. Returns an error if a variable is not initialized, or if it does
  // not have the dtype `dtype` and the shape [shard size, *row_shape]. For
  // 16-bit rows of any dtype, T must be uint16_t.
  template <typename T>
  absl::Status View(
      int first, const std::string& table, const RowPartition& partition,
      const tensorflow::TensorShape& row_shape, ShardedView<const T>* view,
      tensorflow::DataType dtype = tensorflow::DataTypeToEnum<T>::value) const;

  // Returns a view for writing. If another tensor shares the memory of a shard,
  // the memory is copied first, so that the other tensor does not change.
  template <typename T>
  absl::Status MutableView(
      tensorflow::OpKernelContext* ctx, int first, const std::string& table,
      const RowPartition& partition, const tensorflow::TensorShape& row_shape,
      ShardedView<T>* view,
      tensorflow::DataType dtype = tensorflow::DataTypeToEnum<T>::value);

  // Returns a view of the bytes of the rows. Every dtype with a fixed size is
  // supported.
  absl::Status ByteView(int first, const std::string& table,
                        const RowPartition& partition,
                        tensorflow::DataType dtype,
                        const tensorflow::TensorShape& row_shape,
                        ShardedView<const char>* view) const;

  // Copies variable `i`. Returns an error if the variable is not initialized.
  absl::Status Copy(tensorflow::OpKernelContext* ctx, int i,
                    tensorflow::Tensor* copy) const;

  // Sets `count` to a pointer to the value of variable `i`, which must be an
  // int64 scalar. The caller may write the value.
  absl::Status MutableCount(tensorflow::OpKernelContext* ctx, int i,
                            const std::string& table, int64_t** count);

  // Gets the row shape of the first variable, which may have any dtype.
  absl::Status FirstRowShape(const std::string& table,
                             tensorflow::TensorShape* row_shape) const;

  // Gets the number of rows of variable `i`, which must be a shard of a table.
  absl::Status NumRows(int i, const std::string& table,
                       int64_t* num_rows) const;

  // Returns the number of rows of the first variable. Call this method only
  // after `FirstRowShape` has succeeded.
  int64_t FirstNumRows() const { return value(0).dim_size(0); }

  // Returns the memory range of each variable's value.
  std::vector<MemoryRange> Memory() const;

  int size() const { return list_->size(); }

 private:
  tensorflow::Var& variable(int i) const { return *list_->variables_[i]; }
  const tensorflow::Tensor& value(int i) const { return *variable(i).tensor(); }

  absl::Status CheckShards(int first, const std::string& table,
                           const RowPartition& partition,
                           tensorflow::DataType dtype,
                           const tensorflow::TensorShape& row_shape) const;
  absl::Status OwnValue(tensorflow::OpKernelContext* ctx, int i);

  // Sets the members of a view after the shards were checked. A row has `dim`
  // values of type T.
  template <typename T>
  void Fill(int first, const RowPartition& partition, int64_t dim,
            ShardedView<T>* view) const {
    view->partition = &partition;
    view->dim = dim;
    view->shards.clear();
    for (int s = 0; s < partition.num_shards(); ++s) {
      view->shards.push_back(
          static_cast<T*>(variable(first + s).tensor()->data()));
    }
  }

  Mode mode_ = Mode::kShared;
  // The variables that this object has looked up.
  VariableList own_;
  const VariableList* list_ = &own_;
  bool is_locked_ = false;
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
