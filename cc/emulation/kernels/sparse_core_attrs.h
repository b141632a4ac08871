// Attributes that several SparseCore ops have.

#ifndef TF_LAYOUTMAP_EMULATION_KERNELS_SPARSE_CORE_ATTRS_H_
#define TF_LAYOUTMAP_EMULATION_KERNELS_SPARSE_CORE_ATTRS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace layoutmap {

// Reads the name of the stack of tables, and its limits of ids.
template <typename Settings>
absl::Status ReadLimits(tensorflow::OpKernelConstruction* ctx,
                        Settings* settings) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_name", &settings->table));
  TF_RETURN_IF_ERROR(
      ctx->GetAttr("max_ids_per_sparse_core", &settings->max_ids));
  return ctx->GetAttr("max_unique_ids_per_sparse_core",
                      &settings->max_unique_ids);
}

// Reads the number of SparseCores of a chip, and of all chips.
inline absl::Status ReadNumCores(tensorflow::OpKernelConstruction* ctx,
                                 int64_t* num_cores, int64_t* num_shards) {
  int64_t num_replicas;
  TF_RETURN_IF_ERROR(ctx->GetAttr("num_replica", &num_replicas));
  TF_RETURN_IF_ERROR(ctx->GetAttr("num_sc_per_chip", num_cores));
  *num_shards = num_replicas * *num_cores;
  return absl::OkStatus();
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_KERNELS_SPARSE_CORE_ATTRS_H_
