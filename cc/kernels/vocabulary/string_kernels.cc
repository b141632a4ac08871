// Kernels that keep the strings whose hashes are the keys of a vocabulary.

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "absl/log/log.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/string_store.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::tstring;

// The distance at which slots are prefetched before `StringStore::Add`, in
// keys.
constexpr int64_t kKeysAhead = 16;

class StoreResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "StringStore"; }

  std::mutex& mutex() { return mutex_; }
  // The caller must hold the mutex.
  StringStore& store() { return store_; }

 private:
  std::mutex mutex_;
  StringStore store_;
};

using StorePtr = tensorflow::core::RefCountPtr<StoreResource>;

absl::Status GetStore(OpKernelContext* ctx, StorePtr* store) {
  const Tensor* handle;
  TF_RETURN_IF_ERROR(GetInput(ctx, "store", 0, &handle));
  return tensorflow::LookupResource(ctx, handle->scalar<ResourceHandle>()(),
                                    store);
}

std::string_view TextOf(const tstring& text) {
  return {text.data(), text.size()};
}

// Returns an error unless there is one string per key.
absl::Status CheckSizes(const Tensor& keys, const Tensor& strings) {
  if (keys.NumElements() == strings.NumElements()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "`strings` must have one string for each of the ", keys.NumElements(),
      " keys. Received: ", strings.NumElements(), " strings"));
}

class CreateStringStoreOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx,
                   SetScalar(ctx, "store",
                             ResourceHandle::MakeRefCountingHandle(
                                 new StoreResource(), ctx->device()->name())));
  }
};

class KeepStringsOp : public Kernel {
 public:
  explicit KeepStringsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("removes_all", &removes_all_));
  }

  void Run(OpKernelContext* ctx) override {
    bool training;
    StorePtr resource;
    OpInputList keys, strings;
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "training", &training));
    if (!training) return;
    OP_REQUIRES_OK(ctx, GetStore(ctx, &resource));
    OP_REQUIRES_OK(ctx, ctx->input_list("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input_list("strings", &strings));
    int64_t max_size = 0;
    for (int i = 0; i < keys.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckSizes(keys[i], strings[i]));
      max_size += keys[i].NumElements();
    }
    NewStrings added(max_size);
    {
      std::lock_guard<std::mutex> lock(resource->mutex());
      for (int i = 0; i < keys.size(); ++i) {
        FindNew(View<int64_t>(keys[i]), View<tstring>(strings[i]),
                TfParallelFor(ctx), &resource->store(), &added);
      }
    }
    if (added.size == 0 && !removes_all_) return;
    OP_REQUIRES_OK(ctx, Update(ctx, resource.get(), added));
  }

 private:
  // Keys that have no string in the store, and their strings in the inputs. A
  // key can occur several times.
  struct NewStrings {
    explicit NewStrings(int64_t max_size) : keys(max_size), texts(max_size) {}

    RawArray<int64_t> keys;
    RawArray<const tstring*> texts;
    int64_t size = 0;
  };

  // Appends the keys that have no string to `added`. Counts the keys that have
  // another string. The caller must hold the mutex of the store.
  void FindNew(Span<const int64_t> keys, Span<const tstring> strings,
               const ParallelFor& parallel_for, StringStore* store,
               NewStrings* added) const {
    constexpr int64_t kNanosecondsPerKey = 20;
    constexpr int64_t kKeysPerPart = 2048;
    // Known strings are the usual case, so only the other keys are recorded. A
    // record is the index i of a key, or -1 - i if the store has another string
    // of the key. The records of a part begin at the index of its first key.
    // They are therefore in the order of the batch, which determines which of
    // two strings is kept.
    const int64_t num_parts = (keys.size() + kKeysPerPart - 1) / kKeysPerPart;
    const RawArray<int64_t> others(keys.size());
    const RawArray<int64_t> num_others(num_parts);
    const auto find_in_part = [&](int64_t part) {
      const int64_t begin = part * kKeysPerPart;
      const int64_t size = std::min(kKeysPerPart, keys.size() - begin);
      int64_t* const out = others.data() + begin;
      int64_t num_out = 0;
      store->FindAll({keys.data() + begin, size},
                     [&](int64_t i, const std::string_view* kept) {
                       if (kept == nullptr) {
                         out[num_out++] = begin + i;
                       } else if (*kept != TextOf(strings[begin + i])) {
                         out[num_out++] = -1 - (begin + i);
                       }
                     });
      num_others[part] = num_out;
    };
    parallel_for(num_parts, kNanosecondsPerKey * kKeysPerPart,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t p = begin; p < end; ++p) find_in_part(p);
                 });
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t* const records = others.data() + part * kKeysPerPart;
      for (int64_t j = 0; j < num_others[part]; ++j) {
        const int64_t record = records[j];
        if (record >= 0) {
          added->keys[added->size] = keys[record];
          added->texts[added->size++] = &strings[record];
          continue;
        }
        const int64_t i = -1 - record;
        std::string_view kept;
        store->Find(keys[i], &kept);
        CountCollision(kept, TextOf(strings[i]), store);
      }
    }
  }

  // Adds the strings of keys that have a row, and removes strings of keys that
  // have no row. The variables of the keys are locked, so that no key gets or
  // loses a row during this call.
  absl::Status Update(OpKernelContext* ctx, StoreResource* resource,
                      const NewStrings& added) const {
    RowPartition buckets;
    BucketLayout layout;
    LockedShards locked;
    ShardedView<const int64_t> stored;
    TF_RETURN_IF_ERROR(GetPartition(ctx, Placement::kOffsets, &buckets));
    TF_RETURN_IF_ERROR(ToTf(BucketLayout::Make(buckets.num_rows(), &layout)));
    TF_RETURN_IF_ERROR(
        locked.Lock(ctx, {"shards"}, LockedShards::Mode::kShared));
    TF_RETURN_IF_ERROR(
        locked.View(0, table_ + " (keys)", buckets, {kKeysPerBucket}, &stored));
    const ParallelFor parallel_for = TfParallelFor(ctx);
    const RawArray<int64_t> rows(added.size);
    FindKeys(layout, stored, {added.keys.data(), added.size}, parallel_for,
             rows);
    std::lock_guard<std::mutex> lock(resource->mutex());
    StringStore& store = resource->store();
    const int64_t old_size = store.size();
    for (int64_t i = 0; i < added.size; ++i) {
      if (i + kKeysAhead < added.size) {
        store.PrefetchSlot(added.keys[i + kKeysAhead]);
      }
      if (rows[i] == kNoRow) continue;
      const std::string_view text = TextOf(*added.texts[i]);
      std::string_view kept;
      TF_RETURN_IF_ERROR(ToTf(store.Add(added.keys[i], text, &kept)));
      if (kept != text) CountCollision(kept, text, &store);
    }
    const auto select = [&](Span<const int64_t> keys, Span<bool> has_no_row) {
      const RawArray<int64_t> rows_of_keys(keys.size());
      FindKeys(layout, stored, keys, parallel_for, rows_of_keys);
      for (int64_t i = 0; i < keys.size(); ++i) {
        has_no_row[i] = rows_of_keys[i] == kNoRow;
      }
    };
    // Each added string pays for a few slots. All strings of evicted keys are
    // therefore removed after a bounded number of new strings.
    if (removes_all_) {
      store.RemoveAll(select);
    } else {
      store.RemoveNext(kSlotsPerNew * (store.size() - old_size), select);
    }
    return absl::OkStatus();
  }

  void CountCollision(std::string_view kept, std::string_view other,
                      StringStore* store) const {
    if (store->num_collisions() == 0) {
      LOG(WARNING) << "Table '" << table_ << "': the strings \""
                   << absl::CHexEscape(kept) << "\" and \""
                   << absl::CHexEscape(other)
                   << "\" have the same hash and share a row. "
                      "Vocabulary.stats() counts such strings. This warning "
                      "is logged once per table.";
    }
    store->CountCollision(kept, other);
  }

  static constexpr int64_t kSlotsPerNew = 4;

  std::string table_;
  bool removes_all_;
};

class ReadStringsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    StorePtr resource;
    Tensor* strings = nullptr;
    Tensor* is_known = nullptr;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, GetStore(ctx, &resource));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output("strings", keys->shape(), &strings));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output("is_known", keys->shape(), &is_known));
    const Span<const int64_t> of = View<int64_t>(*keys);
    const Span<tstring> out = MutableView<tstring>(strings);
    const Span<bool> known = MutableView<bool>(is_known);
    std::lock_guard<std::mutex> lock(resource->mutex());
    resource->store().FindAll(of, [&](int64_t i, const std::string_view* text) {
      known[i] = text != nullptr;
      if (!known[i]) return;
      out[i].assign(text->data(), text->size());
    });
  }
};

class LoadStringsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    const Tensor* strings;
    StorePtr resource;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input("strings", &strings));
    OP_REQUIRES_OK(ctx, CheckSizes(*keys, *strings));
    OP_REQUIRES_OK(ctx, GetStore(ctx, &resource));
    const Span<const int64_t> of = View<int64_t>(*keys);
    const Span<const tstring> texts = View<tstring>(*strings);
    StringStore loaded;
    for (int64_t i = 0; i < of.size(); ++i) {
      if (i + kKeysAhead < of.size()) loaded.PrefetchSlot(of[i + kKeysAhead]);
      OP_REQUIRES_OK(ctx, ToTf(loaded.Add(of[i], TextOf(texts[i]))));
    }
    std::lock_guard<std::mutex> lock(resource->mutex());
    std::swap(resource->store(), loaded);
  }
};

class DescribeStringsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    StorePtr resource;
    OP_REQUIRES_OK(ctx, GetStore(ctx, &resource));
    std::lock_guard<std::mutex> lock(resource->mutex());
    const StringStore& store = resource->store();
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "num_strings", store.size()));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "num_bytes", store.num_bytes()));
    OP_REQUIRES_OK(ctx,
                   SetScalar(ctx, "num_collisions", store.num_collisions()));
    const auto& collisions = store.collisions();
    Tensor* pairs = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            "collisions",
                            tensorflow::TensorShape(
                                {static_cast<int64_t>(collisions.size()), 2}),
                            &pairs));
    auto out = pairs->matrix<tstring>();
    for (size_t i = 0; i < collisions.size(); ++i) {
      out(i, 0) = collisions[i].kept;
      out(i, 1) = collisions[i].other;
    }
  }
};

LM_REGISTER_KERNEL("CreateStringStore", CreateStringStoreOp);
LM_REGISTER_KERNEL("KeepStrings", KeepStringsOp);
LM_REGISTER_KERNEL("ReadStrings", ReadStringsOp);
LM_REGISTER_KERNEL("LoadStrings", LoadStringsOp);
LM_REGISTER_KERNEL("DescribeStrings", DescribeStringsOp);

}  // namespace
}  // namespace layoutmap
