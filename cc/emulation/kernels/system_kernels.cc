// Kernels that initialize the emulated TPU. They implement ops of TensorFlow
// and ops of this package.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cc/emulation/kernels/tpu_system.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::shape_inference::NoOutputs;
using tensorflow::shape_inference::ScalarShape;

REGISTER_OP("LayoutMap>SetUpEmulation")
    .Attr("num_cores: int")
    .Attr("num_hosts: int")
    .Attr("deadline: float")
    .Attr("sparse_cores_per_chip: int = 0")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(
        "Sets the number of cores and hosts of the emulated TPU, the deadline "
        "of waiting calls in seconds, and the number of SparseCores of each "
        "core, which represents a chip. 0 if the TPU has no SparseCores.");

REGISTER_OP("LayoutMap>ResetEmulation")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc("Discards the steps in flight but keeps the tables.");

REGISTER_OP("LayoutMap>DescribeEmulation")
    .Output("report: string")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(
        "Returns a few lines with the queue of each core and the waiting "
        "calls.");

class SetUpEmulationOp : public Kernel {
 public:
  explicit SetUpEmulationOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_cores", &num_cores_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_hosts", &num_hosts_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("deadline", &deadline_));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("sparse_cores_per_chip", &sparse_cores_per_chip_));
  }

  void Run(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx,
                   TpuSystem::Get().SetUp(num_cores_, num_hosts_, deadline_,
                                          sparse_cores_per_chip_));
  }

 private:
  int32_t num_cores_;
  int32_t num_hosts_;
  float deadline_;
  int32_t sparse_cores_per_chip_;
};

class ResetEmulationOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext*) override {
    const EmulatedEnginePtr engine = TpuSystem::Get().engine();
    if (engine != nullptr) engine->Reset();
  }
};

class DescribeEmulationOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    const EmulatedEnginePtr engine = TpuSystem::Get().engine();
    const std::string report =
        engine == nullptr ? "  no embedding" : engine->Report();
    OP_REQUIRES_OK(ctx, SetScalar<tensorflow::tstring>(ctx, "report", report));
  }
};

class ConfigureEmbeddingOp : public Kernel {
 public:
  explicit ConfigureEmbeddingOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config_));
  }

  void Run(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, TpuSystem::Get().Configure(config_));
  }

 private:
  std::string config_;
};

class IsInitializedOp : public Kernel {
 public:
  explicit IsInitializedOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config_));
  }

  void Run(OpKernelContext* ctx) override {
    const EmulatedEnginePtr engine = TpuSystem::Get().engine();
    const bool is_initialized =
        engine != nullptr && engine->CheckConfig(config_).ok();
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "is_tpu_embedding_initialized", is_initialized));
  }

 private:
  std::string config_;
};

// Appends a varint field with the number `number` to a serialized protocol
// buffer.
void AppendField(int number, uint64_t value, std::string* bytes) {
  bytes->push_back(static_cast<char>(number << 3));
  for (; value >= 0x80; value >>= 7) {
    bytes->push_back(static_cast<char>(value | 0x80));
  }
  bytes->push_back(static_cast<char>(value));
}

class ConfigureSystemOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    TpuSystem& system = TpuSystem::Get();
    OP_REQUIRES(
        ctx, system.num_cores() > 0,
        absl::FailedPreconditionError("The emulated TPU is not set up; call "
                                      "`tlm.emulation.enable` first"));
    system.Shutdown();
    OP_REQUIRES_OK(
        ctx, SetScalar<tensorflow::tstring>(ctx, "topology", Topology(system)));
  }

 private:
  // Returns a serialized TopologyProto in which all cores are in one row.
  static std::string Topology(const TpuSystem& system) {
    enum {
      kMeshShape = 1,
      kNumTasks = 2,
      kNumDevicesPerTask = 3,
      kDeviceCoordinates = 4
    };
    const int32_t num_cores = system.num_cores();
    std::string bytes;
    for (const int32_t size : {num_cores, 1, 1, 1}) {
      AppendField(kMeshShape, size, &bytes);
    }
    AppendField(kNumTasks, system.num_hosts(), &bytes);
    AppendField(kNumDevicesPerTask, num_cores / system.num_hosts(), &bytes);
    for (int32_t core = 0; core < num_cores; ++core) {
      for (const int32_t at : {core, 0, 0, 0}) {
        AppendField(kDeviceCoordinates, at, &bytes);
      }
    }
    return bytes;
  }
};

class ShutdownSystemOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext*) override { TpuSystem::Get().Shutdown(); }
};

LM_REGISTER_KERNEL("SetUpEmulation", SetUpEmulationOp);
LM_REGISTER_KERNEL("ResetEmulation", ResetEmulationOp);
LM_REGISTER_KERNEL("DescribeEmulation", DescribeEmulationOp);
REGISTER_KERNEL_BUILDER(Name("ConfigureTPUEmbedding").Device(DEVICE_CPU),
                        ConfigureEmbeddingOp);
REGISTER_KERNEL_BUILDER(Name("IsTPUEmbeddingInitialized").Device(DEVICE_CPU),
                        IsInitializedOp);
REGISTER_KERNEL_BUILDER(Name("ConfigureDistributedTPU").Device(DEVICE_CPU),
                        ConfigureSystemOp);
REGISTER_KERNEL_BUILDER(Name("ShutdownDistributedTPU").Device(DEVICE_CPU),
                        ShutdownSystemOp);

}  // namespace
}  // namespace layoutmap
