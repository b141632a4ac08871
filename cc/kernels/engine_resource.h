// The engine behind a resource handle, and what its kernels share.

#ifndef TF_LAYOUTMAP_KERNELS_ENGINE_RESOURCE_H_
#define TF_LAYOUTMAP_KERNELS_ENGINE_RESOURCE_H_

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/token_steps.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace layoutmap {

class EngineResource : public tensorflow::ResourceBase {
 public:
  explicit EngineResource(std::unique_ptr<HostEngine> engine)
      : engine_(std::move(engine)), tokens_(engine_.get()) {}

  HostEngine& engine() { return *engine_; }
  TokenSteps& tokens() { return tokens_; }

  std::string DebugString() const override {
    return absl::StrCat("HostEngine with ", engine_->config().tables.size(),
                        " tables");
  }

 private:
  std::unique_ptr<HostEngine> engine_;
  TokenSteps tokens_;
};

using EnginePtr = tensorflow::core::RefCountPtr<EngineResource>;

// The engine of the op's first input, and the number in its second.
absl::Status GetEngine(tensorflow::OpKernelContext* ctx, EnginePtr* engine);
absl::Status GetReplica(tensorflow::OpKernelContext* ctx, int32_t* replica);

// Refuses variables beyond those that the engine's tables need.
absl::Status CheckAllUsed(const char* input, int needed, int received);

// What `run` returns; an error also where it throws for lack of memory, so that
// the engine always hears the end of what it began.
template <typename Run>
absl::Status Finished(const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("Not enough memory: ", error.what()));
  }
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_RESOURCE_H_
