// CPU kernels of TensorFlow's ops that prepare the ids of a step for
// SparseCores. They run on the host of a TPU.

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/log/log.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/emulation/kernels/sparse_core_attrs.h"
#include "cc/emulation/sparse_core/coo_ids.h"
#include "cc/emulation/sparse_core/id_buffers.h"
#include "cc/emulation/sparse_core/sorted_ids.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class ConvertToCooOp : public Kernel {
 public:
  explicit ConvertToCooOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sample_count", &settings_.sample_count));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_sc_per_chip", &settings_.num_cores));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_offset", &settings_.row_offset));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("col_offset", &settings_.col_offset));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("col_shift", &settings_.col_shift));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_sc_shards", &settings_.num_shards));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("stacked_table_sample_count",
                                     &settings_.stacked_sample_count));
    std::string combiner;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("combiner", &combiner));
    OP_REQUIRES(ctx, ParseCombiner(combiner, &settings_.combiner).ok(),
                absl::InvalidArgumentError(absl::StrCat(
                    "Invalid combiner: only \"sum\", \"mean\", and \"sqrtn\" "
                    "are supported, but got ",
                    combiner)));
    OP_REQUIRES_OK(ctx, ToTf(CheckCooSettings(settings_)));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* locations;
    const Tensor* values;
    const Tensor* weights;
    OP_REQUIRES_OK(ctx, ctx->input("indices_or_row_splits", &locations));
    OP_REQUIRES_OK(ctx, ctx->input("values", &values));
    OP_REQUIRES_OK(ctx, ctx->input("weights", &weights));
    OP_REQUIRES(ctx, values->dims() == 1,
                absl::InvalidArgumentError(absl::StrCat(
                    "Values input should have dimension 1. But got dimension ",
                    values->dims(), ".")));
    OP_REQUIRES(
        ctx, weights->dims() <= 1,
        absl::InvalidArgumentError(absl::StrCat(
            "Weights input should have dimension 0 or 1. But got dimension ",
            weights->dims(), ".")));
    // Only a scalar is the weight of all ids.
    OP_REQUIRES(
        ctx,
        weights->dims() == 0 || weights->NumElements() == values->NumElements(),
        absl::InvalidArgumentError(absl::StrCat(
            "Values and weights should have same elements. But got ",
            values->NumElements(), " elements for values and ",
            weights->NumElements(), " elements for weights.")));
    OP_REQUIRES(ctx, locations->dims() == 1 || locations->dims() == 2,
                absl::InvalidArgumentError(absl::StrCat(
                    "Invalid indices_or_row_splits input, Got dimension of ",
                    locations->dims(), " and size of ",
                    locations->NumElements(), ".")));
    CooInput input;
    input.is_sparse = locations->dims() == 2;
    input.num_columns = input.is_sparse ? locations->dim_size(1) : 0;
    input.locations = View<int32_t>(*locations);
    input.ids = View<int32_t>(*values);
    input.weights = View<float>(*weights);
    std::vector<CooIds> cores;
    OP_REQUIRES_OK(ctx, ToTf(ConvertToCoo(settings_, input, &cores)));
    OpOutputList rows;
    OpOutputList cols;
    OpOutputList gains;
    OP_REQUIRES_OK(ctx, ctx->output_list("row_ids_list", &rows));
    OP_REQUIRES_OK(ctx, ctx->output_list("col_ids_list", &cols));
    OP_REQUIRES_OK(ctx, ctx->output_list("gains_list", &gains));
    for (int core = 0; core < settings_.num_cores; ++core) {
      OP_REQUIRES_OK(ctx, SetList(&rows, core, cores[core].rows));
      OP_REQUIRES_OK(ctx, SetList(&cols, core, cores[core].cols));
      OP_REQUIRES_OK(ctx, SetList(&gains, core, cores[core].gains));
    }
  }

 private:
  template <typename T>
  static absl::Status SetList(OpOutputList* outputs, int core,
                              const std::vector<T>& values) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(outputs->allocate(
        core, TensorShape({static_cast<int64_t>(values.size())}), &output));
    std::copy(values.begin(), values.end(), output->flat<T>().data());
    return absl::OkStatus();
  }

  CooSettings settings_;
};

// Base class of kernels whose inputs are the ids of all features on one
// SparseCore.
class CoreFeaturesOp : public Kernel {
 public:
  explicit CoreFeaturesOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    int64_t num_cores;
    OP_REQUIRES_OK(ctx, ReadNumCores(ctx, &num_cores, &num_shards_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("col_offset_list", &col_offsets_));
    OP_REQUIRES_OK(ctx, ToTf(CheckNumShards(num_shards_)));
  }

 protected:
  absl::Status Read(OpKernelContext* ctx,
                    std::vector<CoreFeature>* features) const {
    OpInputList rows;
    OpInputList cols;
    OpInputList gains;
    TF_RETURN_IF_ERROR(ctx->input_list("row_ids_list", &rows));
    TF_RETURN_IF_ERROR(ctx->input_list("col_ids_list", &cols));
    TF_RETURN_IF_ERROR(ctx->input_list("gains_list", &gains));
    if (static_cast<int64_t>(col_offsets_.size()) != rows.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`col_offset_list` must have one element per feature, ", rows.size(),
          ". Received: ", col_offsets_.size(), " elements."));
    }
    for (int i = 0; i < rows.size(); ++i) {
      features->push_back({View<int32_t>(rows[i]), View<int32_t>(cols[i]),
                           View<float>(gains[i]), col_offsets_[i]});
    }
    return absl::OkStatus();
  }

  int64_t num_shards() const { return num_shards_; }

 private:
  std::vector<int64_t> col_offsets_;
  int64_t num_shards_;
};

class SortIdsOp : public CoreFeaturesOp {
 public:
  explicit SortIdsOp(OpKernelConstruction* ctx) : CoreFeaturesOp(ctx) {
    OP_REQUIRES_OK(ctx, ReadLimits(ctx, &settings_));
    std::vector<int64_t> sample_counts;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sample_count_list", &sample_counts));
    settings_.samples_per_core =
        std::accumulate(sample_counts.begin(), sample_counts.end(), int64_t{0});
    OP_REQUIRES(
        ctx, settings_.samples_per_core > 0,
        absl::InvalidArgumentError("The sum of `sample_count_list` must be "
                                   "at least 1."));
    settings_.num_shards = num_shards();
  }

  void Run(OpKernelContext* ctx) override {
    std::vector<CoreFeature> features;
    OP_REQUIRES_OK(ctx, Read(ctx, &features));
    SortedIds sorted;
    OP_REQUIRES_OK(ctx, ToTf(SortIds(features, settings_, &sorted)));
    OP_REQUIRES_OK(ctx, SetVector<int32_t>(ctx, "sorted_row_ids", sorted.rows));
    OP_REQUIRES_OK(ctx, SetVector<int32_t>(ctx, "sorted_col_ids", sorted.cols));
    OP_REQUIRES_OK(ctx, SetVector<float>(ctx, "sorted_gains", sorted.gains));
    OP_REQUIRES_OK(ctx, SetVector<int32_t>(ctx, "id_counts", sorted.counts));
  }

 private:
  SortSettings settings_;
};

class CountIdsOp : public CoreFeaturesOp {
 public:
  using CoreFeaturesOp::CoreFeaturesOp;

  void Run(OpKernelContext* ctx) override {
    std::vector<CoreFeature> features;
    OP_REQUIRES_OK(ctx, Read(ctx, &features));
    int32_t max_ids;
    int32_t max_unique_ids;
    OP_REQUIRES_OK(
        ctx, ToTf(CountIds(features, num_shards(), &max_ids, &max_unique_ids)));
    OP_REQUIRES_OK(ctx,
                   SetScalar<int32_t>(ctx, "max_ids_per_sparse_core", max_ids));
    OP_REQUIRES_OK(ctx,
                   SetScalar<int32_t>(ctx, "max_unique_ids_per_sparse_core",
                                      max_unique_ids));
  }
};

class FillBuffersOp : public Kernel {
 public:
  explicit FillBuffersOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadNumCores(ctx, &num_cores_, &settings_.num_shards));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("sample_count_per_sc", &settings_.samples_per_core));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_minibatches_per_sc",
                                     &settings_.max_minibatches));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_ids_per_chip_per_sample",
                                     &settings_.max_ids_per_chip_per_sample));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("allow_id_dropping", &settings_.allow_id_dropping));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_name", &table_));
  }

  void Run(OpKernelContext* ctx) override {
    OpInputList rows;
    OpInputList cols;
    OpInputList gains;
    OpInputList counts;
    OP_REQUIRES_OK(ctx, ctx->input_list("sorted_row_ids_list", &rows));
    OP_REQUIRES_OK(ctx, ctx->input_list("sorted_col_ids_list", &cols));
    OP_REQUIRES_OK(ctx, ctx->input_list("sorted_gains_list", &gains));
    OP_REQUIRES_OK(ctx, ctx->input_list("id_counts_list", &counts));
    std::vector<CoreIds> cores;
    for (int core = 0; core < num_cores_; ++core) {
      cores.push_back({View<int32_t>(rows[core]), View<int32_t>(cols[core]),
                       View<float>(gains[core]), View<int32_t>(counts[core])});
    }
    const Tensor* splits_tensor;
    OP_REQUIRES_OK(ctx, ctx->input("splits", &splits_tensor));
    int64_t splits = 0;
    for (const int64_t split : View<int64_t>(*splits_tensor)) splits |= split;
    BufferSizes sizes;
    OP_REQUIRES_OK(ctx, ToTf(SizeOfBuffers(settings_, num_cores_, &sizes)));
    IdBuffers buffers;
    OP_REQUIRES_OK(ctx, Allocate(ctx, "row_pointers", sizes.num_row_pointers,
                                 &buffers.row_pointers));
    OP_REQUIRES_OK(
        ctx, Allocate(ctx, "sorted_sample_ids", sizes.num_ids, &buffers.rows));
    OP_REQUIRES_OK(
        ctx, Allocate(ctx, "sorted_token_ids", sizes.num_ids, &buffers.cols));
    OP_REQUIRES_OK(
        ctx, Allocate(ctx, "sorted_gains", sizes.num_ids, &buffers.gains));
    OP_REQUIRES_OK(ctx, ToTf(FillBuffers(settings_, splits, cores, &buffers)));
    if (buffers.num_dropped_ids > 0) {
      LOG(WARNING) << "Table " << table_ << " is dropping "
                   << buffers.num_dropped_ids
                   << " ids, because the buffers of a chip have only "
                   << sizes.num_ids << " elements.";
    }
    OP_REQUIRES_OK(ctx, SetScalar<int32_t>(ctx, "row_pointers_unpadded_size",
                                           buffers.row_pointers_unpadded_size));
    OP_REQUIRES_OK(ctx, SetScalar<int32_t>(ctx, "ids_unpadded_size",
                                           buffers.ids_unpadded_size));
    OP_REQUIRES_OK(ctx, SetScalar<int32_t>(ctx, "num_minibatches_per_sc",
                                           buffers.num_minibatches));
  }

 private:
  template <typename T>
  static absl::Status Allocate(OpKernelContext* ctx, const char* name,
                               int64_t size, Span<T>* view) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(name, TensorShape({size}), &output));
    *view = MutableView<T>(output);
    return absl::OkStatus();
  }

  BufferSettings settings_;
  int64_t num_cores_;
  std::string table_;
};

REGISTER_KERNEL_BUILDER(
    Name("ConvertToListOfSparseCoreCooTensors").Device(DEVICE_CPU),
    ConvertToCooOp);
REGISTER_KERNEL_BUILDER(
    Name("SortListOfSparseCoreCooTensors").Device(DEVICE_CPU), SortIdsOp);
REGISTER_KERNEL_BUILDER(
    Name("GetStatsFromListOfSparseCoreCooTensors").Device(DEVICE_CPU),
    CountIdsOp);
REGISTER_KERNEL_BUILDER(
    Name("ConvertToSparseCoreCsrWrappedCooTensor").Device(DEVICE_CPU),
    FillBuffersOp);

}  // namespace
}  // namespace layoutmap
