// Functions of a worker that write and read the messages to and from servers.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_WORKER_MESSAGES_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_WORKER_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/worker_step.h"
#include "cc/kernels/engine/engine_config_reader.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/servers/aligned_bytes.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

// Reads the attributes that contain the server of each shard.
inline absl::Status ReadServersConfig(tensorflow::OpKernelConstruction* ctx,
                                      ServersConfig* config) {
  tensorflow::DataType wire;
  TF_RETURN_IF_ERROR(ReadEngineConfig(ctx, &config->engine));
  TF_RETURN_IF_ERROR(ctx->GetAttr("num_servers", &config->num_servers));
  TF_RETURN_IF_ERROR(ctx->GetAttr("shard_servers", &config->server_of_shard));
  TF_RETURN_IF_ERROR(ctx->GetAttr("wire_dtype", &wire));
  config->wire =
      wire == tensorflow::DT_BFLOAT16 ? RowType::kBfloat16 : RowType::kFloat32;
  return ToTf(CheckServersConfig(*config));
}

// Reads the input `token`, which identifies a closure.
inline absl::Status GetToken(tensorflow::OpKernelContext* ctx,
                             ClosureToken* token) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(GetInput(ctx, "token", 1, &tensor));
  if (tensor->NumElements() != 3) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`token` must have three values: epoch, number and attempt. Received: ",
        tensor->NumElements(), " values"));
  }
  const auto values = tensor->vec<int64_t>();
  *token = {values(0), values(1), values(2)};
  return absl::OkStatus();
}

// Allocates one output tensor for the message to each server.
class Requests {
 public:
  absl::Status Get(tensorflow::OpKernelContext* ctx) {
    return ctx->output_list("requests", &list_);
  }

  // Gets the outputs, and the input list `next`. If the list is not empty, each
  // output is a `joined` message that ends with the input of its server.
  absl::Status GetWithNext(tensorflow::OpKernelContext* ctx) {
    TF_RETURN_IF_ERROR(Get(ctx));
    TF_RETURN_IF_ERROR(ctx->input_list("next", &next_));
    if (next_.size() != 0) {
      TF_RETURN_IF_ERROR(CheckCount("num_next", list_.size(), next_.size()));
    }
    for (const tensorflow::Tensor& one : next_) {
      TF_RETURN_IF_ERROR(CheckRank("next", one, 1));
    }
    return absl::OkStatus();
  }

  // Returns the number of outputs.
  int size() const { return list_.size(); }

  Allocate allocate() {
    return [this](int32_t server, int64_t size, uint8_t** bytes) {
      const bool is_joined = next_.size() != 0;
      Span<const uint8_t> next;
      if (is_joined) next = View<uint8_t>(next_[server]);
      const int64_t total = is_joined ? JoinedBytes(size, next.size()) : size;
      tensorflow::Tensor* output = nullptr;
      status_ =
          list_.allocate(server, tensorflow::TensorShape({total}), &output);
      if (!status_.ok()) return OutOfMemory("Allocating a request failed");
      uint8_t* const start = output->flat<uint8_t>().data();
      *bytes = is_joined ? WriteJoined(size, next, start) : start;
      return Status();
    };
  }

  // Returns the error if an allocation has failed. Otherwise, returns `status`,
  // the result of the core.
  absl::Status Result(const Status& status) const {
    return status_.ok() ? ToTf(status) : status_;
  }

 private:
  tensorflow::OpOutputList list_;
  tensorflow::OpInputList next_;
  absl::Status status_;
};

// Reads the input list `fetched`, which contains the responses of the servers.
class Fetched {
 public:
  absl::Status Get(tensorflow::OpKernelContext* ctx) {
    tensorflow::OpInputList list;
    TF_RETURN_IF_ERROR(ctx->input_list("fetched", &list));
    tensors_.resize(list.size());
    for (int s = 0; s < list.size(); ++s) {
      TF_RETURN_IF_ERROR(CheckRank("fetched", list[s], 1));
      tensors_[s].Set(list[s]);
      bytes_.push_back(tensors_[s].bytes());
    }
    return absl::OkStatus();
  }

  const std::vector<Span<const uint8_t>>& bytes() const { return bytes_; }

 private:
  std::vector<AlignedBytes> tensors_;
  std::vector<Span<const uint8_t>> bytes_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_WORKER_MESSAGES_H_
