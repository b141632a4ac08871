// Devices of type GPU whose memory is the memory of the host.
//
// With this library, tests check on a machine without a GPU where TensorFlow
// places variables and ops, and which tensors it copies. A file contains the
// kernels that a build of TensorFlow for GPUs registers, as a KernelList. For
// each of them, the library registers a kernel for GPUs that runs the kernel
// for CPUs. An op without a kernel for GPUs in that build therefore has none
// here. XLA does not compile for these devices.
//
// TensorFlow must load the library before it creates its devices. Environment
// variables:
//   FAKE_GPUS: the number of devices.
//   FAKE_GPU_KERNELS: path of the KernelList.
//
// The functions at the end of the file record the copies between the host and
// the devices.

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/common_runtime/copy_tensor.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_factory.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_util.h"

namespace layoutmap {
namespace {

namespace tf = tensorflow;

constexpr char kType[] = "GPU";
constexpr int64_t kBytes = int64_t{4} << 30;

// Copies the elements of `from` to the buffer of `to`, which can be a part of a
// larger buffer. Tensors of strings, variants or resources get a new buffer.
void Copy(const tf::Tensor& from, tf::Tensor* to) {
  if (tf::DataTypeCanUseMemcpy(from.dtype()) && to->IsInitialized() &&
      to->TotalBytes() == from.TotalBytes()) {
    if (from.TotalBytes() > 0) {
      std::memcpy(const_cast<char*>(to->tensor_data().data()),
                  from.tensor_data().data(), from.TotalBytes());
    }
  } else {
    *to = tf::tensor::DeepCopy(from);
  }
}

// One copy between the host and a device.
struct Record {
  bool to_device;
  int64_t bytes;
  std::string dtype;
  std::string shape;
  // Name of the edge of the graph. It is empty if eager code copies a tensor.
  std::string edge;
  // Buffer on the device. A buffer of the host can be used again.
  const void* buffer;
};

// The copies since the recording started. All functions are thread-safe.
class Recorder {
 public:
  void Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    records_.clear();
    is_recording_ = true;
  }

  std::vector<Record> Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_recording_ = false;
    return std::exchange(records_, {});
  }

  // Records a copy of `tensor`. The buffer of `on_device` identifies the copy
  // for `SetEdge`.
  void Add(bool to_device, const tf::Tensor& tensor, absl::string_view edge,
           const tf::Tensor& on_device) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_recording_) return;
    records_.push_back({to_device, static_cast<int64_t>(tensor.TotalBytes()),
                        tf::DataTypeString(tensor.dtype()),
                        tensor.shape().DebugString(), std::string(edge),
                        BufferOf(on_device)});
  }

  // Sets the name of the last copy to the device whose result is `tensor`,
  // because TensorFlow does not pass the names of these copies to the device.
  void SetEdge(const tf::Tensor& tensor, const std::string& edge) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto record = records_.rbegin(); record != records_.rend(); ++record) {
      if (record->to_device && record->buffer == BufferOf(tensor)) {
        record->edge = edge;
        return;
      }
    }
  }

 private:
  static const void* BufferOf(const tf::Tensor& tensor) {
    return tensor.IsInitialized() ? tensor.tensor_data().data() : nullptr;
  }

  std::mutex mutex_;
  bool is_recording_ = false;
  std::vector<Record> records_;
};

Recorder& recorder() {
  static Recorder& recorder = *new Recorder;
  return recorder;
}

class Context : public tf::DeviceContext {
 public:
  void CopyCPUTensorToDevice(const tf::Tensor* from, tf::Device* device,
                             tf::Tensor* to, tf::StatusCallback done,
                             bool sync) const override {
    Copy(*from, to);
    recorder().Add(/*to_device=*/true, *from, /*edge=*/"", *to);
    done(absl::OkStatus());
  }

  void CopyTensorInSameDevice(const tf::Tensor* from, tf::Device* device,
                              tf::Tensor* to,
                              tf::StatusCallback done) const override {
    Copy(*from, to);
    done(absl::OkStatus());
  }

  void CopyDeviceTensorToCPU(const tf::Tensor* from, absl::string_view name,
                             tf::Device* device, tf::Tensor* to,
                             tf::StatusCallback done) override {
    Copy(*from, to);
    recorder().Add(/*to_device=*/false, *from, name, *from);
    done(absl::OkStatus());
  }

  absl::Status ThenExecute(tf::Device* device, stream_executor::Stream* stream,
                           std::function<void()> function) override {
    function();
    return absl::OkStatus();
  }

  tf::Allocator* host_memory_allocator() const override {
    return tf::cpu_allocator();
  }
};

class FakeGpu : public tf::LocalDevice {
 public:
  FakeGpu(const tf::SessionOptions& options,
          const tf::DeviceAttributes& attributes)
      : LocalDevice(options, attributes), context_(new Context) {
    info_.default_context = context_;
    set_tensorflow_accelerator_device_info(&info_);
  }

  ~FakeGpu() override { context_->Unref(); }

  tf::Allocator* GetAllocator(tf::AllocatorAttributes attributes) override {
    return tf::cpu_allocator();
  }

  absl::Status MakeTensorFromProto(const tf::TensorProto& proto,
                                   const tf::AllocatorAttributes attributes,
                                   tf::Tensor* tensor) override {
    tf::Tensor parsed;
    if (!parsed.FromProto(tf::cpu_allocator(), proto)) {
      return absl::InvalidArgumentError("The TensorProto cannot be parsed.");
    }
    *tensor = std::move(parsed);
    return absl::OkStatus();
  }

  void CopyTensorInSameDevice(const tf::Tensor* from, tf::Tensor* to,
                              const tf::DeviceContext* context,
                              tf::StatusCallback done) override {
    Copy(*from, to);
    done(absl::OkStatus());
  }

  absl::Status TryGetDeviceContext(tf::DeviceContext** context) override {
    context_->Ref();
    *context = context_;
    return absl::OkStatus();
  }

  absl::Status Sync() override { return absl::OkStatus(); }

  // Runs an asynchronous kernel. Copies to the device are results of _Recv.
  void ComputeAsync(tf::AsyncOpKernel* kernel, tf::OpKernelContext* context,
                    tf::AsyncOpKernel::DoneCallback done) override {
    std::string edge;
    if (kernel->type_string() != "_Recv" ||
        !tf::TryGetNodeAttr(kernel->def(), "tensor_name", &edge)) {
      LocalDevice::ComputeAsync(kernel, context, std::move(done));
      return;
    }
    kernel->ComputeAsync(context, [context, edge, done = std::move(done)] {
      const tf::Tensor* received = context->mutable_output(0);
      if (received != nullptr) recorder().SetEdge(*received, edge);
      done();
    });
  }

 private:
  Context* const context_;
  tf::DeviceBase::AcceleratorDeviceInfo info_;
};

class Factory : public tf::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* names) override {
    for (int number = 0; number < Count(); ++number) {
      names->push_back("/physical_device:GPU:" + std::to_string(number));
    }
    return absl::OkStatus();
  }

  absl::Status CreateDevices(
      const tf::SessionOptions& options, const std::string& prefix,
      std::vector<std::unique_ptr<tf::Device>>* devices) override {
    for (int number = 0; number < Count(); ++number) {
      devices->push_back(std::make_unique<FakeGpu>(
          options, tf::Device::BuildDeviceAttributes(
                       prefix + "/device:GPU:" + std::to_string(number),
                       tf::DeviceType(kType), tf::Bytes(kBytes),
                       tf::DeviceLocality(), "GPU in host memory")));
    }
    return absl::OkStatus();
  }

 private:
  static int Count() {
    const char* count = std::getenv("FAKE_GPUS");
    return count == nullptr ? 1 : std::atoi(count);
  }
};

// Creates the kernel for CPUs of an op.
class KernelFactory : public tf::kernel_factory::OpKernelFactory {
 public:
  tf::OpKernel* Create(tf::OpKernelConstruction* construction) override {
    std::shared_ptr<const tf::NodeProperties> properties;
    tf::OpKernel* kernel = nullptr;
    absl::Status status = tf::NodeProperties::CreateFromNodeDef(
        construction->def(), tf::OpRegistry::Global(), &properties);
    if (status.ok()) {
      status = tf::CreateOpKernel(
          tf::DeviceType("CPU"), construction->device(), tf::cpu_allocator(),
          construction->function_library(), construction->resource_manager(),
          properties, construction->graph_def_version(), &kernel);
    }
    if (!status.ok()) construction->SetStatus(status);
    return kernel;
  }
};

// Identifies a kernel, except for its priority.
std::string KeyOf(tf::KernelDef kernel) {
  kernel.clear_priority();
  return kernel.SerializeAsString();
}

bool IsOneOf(const tf::KernelDef& kernel, const char* type) {
  return kernel.device_type() == type || kernel.device_type() == "DEFAULT";
}

void RegisterKernels(const tf::KernelList& wanted) {
  std::set<std::string> registered;
  std::set<std::string> ops_of_cpus;
  const tf::KernelList here = tf::GetAllRegisteredKernels();
  for (const tf::KernelDef& kernel : here.kernel()) {
    if (IsOneOf(kernel, kType)) registered.insert(KeyOf(kernel));
    if (IsOneOf(kernel, "CPU")) ops_of_cpus.insert(kernel.op());
  }
  for (const tf::KernelDef& kernel : wanted.kernel()) {
    // The runtime implements ops such as _Send. The graph optimizer creates ops
    // such as _FusedConv2D.
    const bool is_public = kernel.op()[0] != '_';
    const bool is_fused = kernel.op().rfind("_Fused", 0) == 0;
    if (IsOneOf(kernel, kType) && ops_of_cpus.count(kernel.op()) > 0 &&
        (is_public || is_fused) && registered.insert(KeyOf(kernel)).second) {
      tf::kernel_factory::OpKernelRegistrar(new tf::KernelDef(kernel),
                                            "FakeGpuKernel",
                                            std::make_unique<KernelFactory>());
    }
  }
}

bool Register() {
  const char* path = std::getenv("FAKE_GPU_KERNELS");
  std::ifstream file(path == nullptr ? "" : path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  tf::KernelList kernels;
  if (bytes.empty() || !kernels.ParseFromString(bytes)) {
    LOG(FATAL) << "FAKE_GPU_KERNELS must be the path of a KernelList.";
  }
  tf::DeviceFactory::Register(kType, std::make_unique<Factory>(),
                              /*priority=*/220, /*is_pluggable_device=*/true);
  RegisterKernels(kernels);
  return tf::CopyTensor::Register(
             tf::DeviceType(kType), tf::DeviceType(kType),
             [](tf::DeviceContext* sender, tf::DeviceContext* receiver,
                tf::Device* from_device, tf::Device* to_device,
                tf::AllocatorAttributes from_attributes,
                tf::AllocatorAttributes to_attributes, const tf::Tensor* from,
                tf::Tensor* to, int stream, tf::StatusCallback done) {
               Copy(*from, to);
               done(absl::OkStatus());
             },
             /*is_pluggable_device=*/true)
      .ok();
}

[[maybe_unused]] const bool is_registered = Register();

}  // namespace
}  // namespace layoutmap

extern "C" {

// Starts the recording of copies between the host and the devices, and discards
// the copies recorded so far.
__attribute__((visibility("default"))) void fake_gpu_start_recording() {
  layoutmap::recorder().Start();
}

// Ends the recording. Returns one line for each copy: the destination (`host`
// or `device`), bytes, dtype, shape and name of the edge, separated by tabs.
// The next call in the same thread changes the result.
__attribute__((visibility("default"))) const char* fake_gpu_stop_recording() {
  thread_local std::string lines;
  std::ostringstream text;
  for (const layoutmap::Record& record : layoutmap::recorder().Stop()) {
    text << (record.to_device ? "device" : "host") << '\t' << record.bytes
         << '\t' << record.dtype << '\t' << record.shape << '\t' << record.edge
         << '\n';
  }
  lines = text.str();
  return lines.c_str();
}
}
