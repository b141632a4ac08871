// The shards of one or more tables, held under their variables' locks.

#ifndef TF_LAYOUTMAP_KERNELS_LOCKED_SHARDS_H_
#define TF_LAYOUTMAP_KERNELS_LOCKED_SHARDS_H_

#include <string>
#include <utility>
#include <vector>

#include "cc/core/lookup.h"
#include "cc/core/row_partition.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"

namespace layoutmap {

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
  // unless they are initialised float32 [shard size, dim].
  absl::Status View(int first, const std::string& table,
                    const RowPartition& partition, int64_t dim,
                    ShardedView<const float>* view) const;

  // The same for writing. A shard whose value somebody still holds gets a copy
  // of its own first: that reader's tensor must not change under it.
  absl::Status MutableView(tensorflow::OpKernelContext* ctx, int first,
                           const std::string& table,
                           const RowPartition& partition, int64_t dim,
                           ShardedView<float>* view);

  int size() const { return static_cast<int>(variables_.size()); }

 private:
  absl::Status CheckShards(int first, const std::string& table,
                           const RowPartition& partition, int64_t dim) const;

  // TensorFlow has deprecated the name of this type, not what returns it.
  using Mutex = decltype(std::declval<tensorflow::Var>().mu());

  Mode mode_ = Mode::kShared;
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<Mutex> locked_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_LOCKED_SHARDS_H_
