// Kernels that compute the initial values of a block of a variable and write
// them to huge pages.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/block_runs.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/core/simd/random_kernels.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/kernels/random_op_cpu.h"
#include "tensorflow/core/kernels/random_ops_util.h"
#include "tensorflow/core/lib/random/random_distributions.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::random::NormalDistribution;
using tensorflow::random::PhiloxRandom;
using tensorflow::random::SingleSampleAdapter;
using tensorflow::random::TruncatedNormalDistribution;
using tensorflow::random::UniformDistribution;

// Number of values that are drawn at a time, and then scaled while they are
// still in the first-level cache.
constexpr int64_t kTile = 2048;

// Total number of bytes that the `RandomBlock` ops of this process have
// written.
std::atomic<int64_t> bytes_drawn{0};

void CountDrawn(int64_t bytes) {
  bytes_drawn.fetch_add(bytes, std::memory_order_relaxed);
}

// Fills ranges of a random tensor with the numbers of TensorFlow's CPU kernel,
// multiplied by `factor`, plus `offset`. A distribution generates groups of
// numbers. The groups are independent of each other, so that any range can be
// generated separately.
template <typename Distribution, typename T>
class Ranges {
 public:
  Ranges(const PhiloxRandom& generator, T factor, T offset)
      : generator_(generator), factor_(factor), offset_(offset) {}

  // Writes the elements [first, first + size) to `data`. `size` is at most
  // `kTile`.
  void Fill(int64_t first, int64_t size, T* data) const {
    const int64_t skipped = first % kGroup;
    PhiloxRandom generator = generator_;
    generator.Skip(first / kGroup * kSkipPerGroup);
    if (skipped == 0) {
      Draw(generator, size, data);
    } else {
      // The range begins inside a group.
      T tile[kTile + kGroup];
      Draw(generator, skipped + size, tile);
      std::copy_n(tile + skipped, size, data);
    }
  }

  static int64_t CostPerElement() {
    return 1 + Distribution::kElementCost / kGroup;
  }

 private:
  static constexpr bool kIsVariable = Distribution::kVariableSamplesPerOutput;
  using Task =
      tensorflow::functor::FillPhiloxRandomTask<Distribution, kIsVariable>;
  static constexpr int64_t kGroup = Distribution::kResultElementCount;

  static constexpr int64_t SkipPerGroup() {
    if constexpr (kIsVariable) {
      return kGroup * Task::kReservedSamplesPerOutput /
             PhiloxRandom::kResultElementCount;
    } else {
      return 1;
    }
  }
  static constexpr int64_t kSkipPerGroup = SkipPerGroup();

  // Writes the next `size` elements of the generator to `data`.
  void Draw(const PhiloxRandom& generator, int64_t size, T* data) const {
    if constexpr (std::is_same_v<Distribution,
                                 UniformDistribution<PhiloxRandom, float>>) {
      PhiloxState state;
      std::copy_n(&generator.counter()[0], 4, state.counter);
      std::copy_n(&generator.key()[0], 2, state.key);
      RandomKernelsFor(CurrentCpuLevel())
          .fill_uniform(state, factor_, offset_, size, data);
    } else {
      Task::Run(generator, data, size, 0, (size + kGroup - 1) / kGroup,
                Distribution());
      for (int64_t i = 0; i < size; ++i) {
        // The product and the sum are rounded separately, so that the result
        // equals the result of two TensorFlow ops.
        const T scaled = data[i] * factor_;
        data[i] = scaled + offset_;
      }
    }
  }

  const PhiloxRandom generator_;
  const T factor_;
  const T offset_;
};

// The value of every element is `offset`.
template <typename T>
class ConstantRanges {
 public:
  explicit ConstantRanges(T offset) : offset_(offset) {}

  void Fill(int64_t /*first*/, int64_t size, T* data) const {
    std::fill_n(data, size, offset_);
  }

  static int64_t CostPerElement() { return 1; }

 private:
  const T offset_;
};

// Writes a block of the tensor that `ranges` describes to `data`. Padding is 0.
template <typename AnyRanges, typename T>
void FillBlock(const AnyRanges& ranges, const BlockRuns& runs, T* data,
               const ParallelFor& parallel_for) {
  if (runs.run_size() == 0) return;
  const int64_t tiles_per_run = (runs.run_size() + kTile - 1) / kTile;
  const int64_t tile_size = std::min(runs.run_size(), kTile);
  parallel_for(runs.num_runs() * tiles_per_run,
               tile_size * AnyRanges::CostPerElement(),
               [&](int64_t begin, int64_t end) {
                 for (int64_t tile = begin; tile < end; ++tile) {
                   const int64_t index = tile / tiles_per_run;
                   const BlockRuns::Run run = runs.run(index);
                   const int64_t from = tile % tiles_per_run * kTile;
                   const int64_t to = std::min(from + kTile, runs.run_size());
                   const int64_t drawn =
                       std::clamp<int64_t>(run.size - from, 0, to - from);
                   T* const out = data + index * runs.run_size() + from;
                   if (drawn > 0) ranges.Fill(run.first + from, drawn, out);
                   std::fill(out + drawn, out + (to - from), T(0));
                   CountDrawn((to - from) * sizeof(T));
                 }
               });
}

template <typename T>
class RandomBlockOp : public Kernel {
 public:
  explicit RandomBlockOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distribution", &distribution_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor *sizes, *generator;
    T factor, offset;
    OP_REQUIRES_OK(ctx, ctx->input("shape", &sizes));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, tensorflow::tensor::MakeShape(*sizes, &shape));
    std::optional<BlockRuns> runs;
    OP_REQUIRES_OK(ctx, ReadBlock(ctx, shape, &runs));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "generator", 1, &generator));
    OP_REQUIRES(ctx, generator->NumElements() == 3,
                absl::InvalidArgumentError(
                    absl::StrCat("`generator` must be a counter of two numbers "
                                 "and a key. Received: ",
                                 generator->NumElements(), " numbers")));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "factor", &factor));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "offset", &offset));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("output", shape, &output));
    AdviseHugePages(output->data(), output->TotalBytes());

    T* const data = output->flat<T>().data();
    const ParallelFor parallel_for = TfParallelFor(ctx);
    const uint64_t* words = generator->flat<uint64_t>().data();
    const PhiloxRandom philox =
        tensorflow::GetPhiloxRandomFromCounterKeyMem(words, words + 2);
    if (distribution_ == "uniform") {
      FillBlock(Ranges<UniformDistribution<PhiloxRandom, T>, T>(philox, factor,
                                                                offset),
                *runs, data, parallel_for);
    } else if (distribution_ == "normal") {
      FillBlock(Ranges<NormalDistribution<PhiloxRandom, T>, T>(philox, factor,
                                                               offset),
                *runs, data, parallel_for);
    } else if (distribution_ == "truncated_normal") {
      using Distribution =
          TruncatedNormalDistribution<SingleSampleAdapter<PhiloxRandom>, T>;
      FillBlock(Ranges<Distribution, T>(philox, factor, offset), *runs, data,
                parallel_for);
    } else {
      FillBlock(ConstantRanges<T>(offset), *runs, data, parallel_for);
    }
  }

 private:
  // Reads the shape of the full tensor and the location of a block of shape
  // `shape` in this tensor.
  static absl::Status ReadBlock(OpKernelContext* ctx, const TensorShape& shape,
                                std::optional<BlockRuns>* runs) {
    const Tensor *full_sizes, *start;
    int64_t row_step;
    TF_RETURN_IF_ERROR(ctx->input("full_shape", &full_sizes));
    TensorShape full;
    TF_RETURN_IF_ERROR(tensorflow::tensor::MakeShape(*full_sizes, &full));
    TF_RETURN_IF_ERROR(GetInput(ctx, "start", 1, &start));
    TF_RETURN_IF_ERROR(GetScalar(ctx, "row_step", &row_step));
    if (full.dims() != shape.dims() || start->NumElements() != shape.dims()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`shape`, `full_shape` and `start` must have one number per "
          "dimension. Received: shape=",
          shape.DebugString(), ", full_shape=", full.DebugString(),
          ", start with ", start->NumElements(), " numbers"));
    }
    if (row_step < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`row_step` must be at least 1. Received: row_step=", row_step));
    }
    std::vector<int64_t> full_shape, block_shape, starts;
    for (int dim = 0; dim < shape.dims(); ++dim) {
      full_shape.push_back(full.dim_size(dim));
      block_shape.push_back(shape.dim_size(dim));
      starts.push_back(start->flat<int64_t>()(dim));
      if (starts.back() < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("`start` must not be negative. Received: start[", dim,
                         "]=", starts.back()));
      }
    }
    runs->emplace(std::move(full_shape), std::move(block_shape),
                  std::move(starts), row_step);
    return absl::OkStatus();
  }

  std::string distribution_;
};

class BytesDrawnOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    Tensor* size = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("size", TensorShape({}), &size));
    size->scalar<int64_t>()() = bytes_drawn.load(std::memory_order_relaxed);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("LayoutMap>BytesDrawn").Device(tensorflow::DEVICE_CPU), BytesDrawnOp);

#define REGISTER_RANDOM_BLOCK(type)                           \
  REGISTER_KERNEL_BUILDER(Name("LayoutMap>RandomBlock")       \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<type>("dtype"), \
                          RandomBlockOp<type>)
REGISTER_RANDOM_BLOCK(Eigen::half);
REGISTER_RANDOM_BLOCK(Eigen::bfloat16);
REGISTER_RANDOM_BLOCK(float);
REGISTER_RANDOM_BLOCK(double);
#undef REGISTER_RANDOM_BLOCK

}  // namespace
}  // namespace layoutmap
