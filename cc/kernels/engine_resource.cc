#include "cc/kernels/engine_resource.h"

namespace layoutmap {

using tensorflow::OpKernelContext;

absl::Status GetEngine(OpKernelContext* ctx, EnginePtr* engine) {
  TF_RETURN_IF_ERROR(CheckRank("engine", ctx->input(0), 0));
  return tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0),
                                    engine);
}

absl::Status GetReplica(OpKernelContext* ctx, int32_t* replica) {
  TF_RETURN_IF_ERROR(CheckRank("replica", ctx->input(1), 0));
  *replica = ctx->input(1).scalar<int32_t>()();
  return absl::OkStatus();
}

absl::Status CheckAllUsed(const char* input, int needed, int received) {
  if (needed == received) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("This engine's tables need ",
                                                 needed, " `", input,
                                                 "`. Received: ", received));
}

}  // namespace layoutmap
