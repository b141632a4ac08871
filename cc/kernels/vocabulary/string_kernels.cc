// Kernels that keep the strings whose hashes are the keys of a vocabulary.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/log/log.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/string_store.h"
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
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "training", &training));
    if (!training) return;
    OP_REQUIRES_OK(ctx, GetStore(ctx, &resource));
    std::vector<Item> items;
    OP_REQUIRES_OK(ctx, FindNew(ctx, resource.get(), &items));
    if (items.empty() && !removes_all_) return;
    OP_REQUIRES_OK(ctx, Update(ctx, resource.get(), items));
  }

 private:
  // A key with its string, which points to an input.
  struct Item {
    int64_t key;
    std::string_view text;
  };

  // Appends the items whose keys have no string. Counts the items whose keys
  // have another string.
  absl::Status FindNew(OpKernelContext* ctx, StoreResource* resource,
                       std::vector<Item>* items) const {
    OpInputList keys, strings;
    TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
    TF_RETURN_IF_ERROR(ctx->input_list("strings", &strings));
    std::lock_guard<std::mutex> lock(resource->mutex());
    for (int i = 0; i < keys.size(); ++i) {
      TF_RETURN_IF_ERROR(CheckSizes(keys[i], strings[i]));
      FindNewOf(ctx, View<int64_t>(keys[i]), View<tstring>(strings[i]),
                &resource->store(), items);
    }
    return absl::OkStatus();
  }

  void FindNewOf(OpKernelContext* ctx, Span<const int64_t> keys,
                 Span<const tstring> strings, StringStore* store,
                 std::vector<Item>* items) const {
    // Approximate time per key.
    constexpr int64_t kNanosecondsPerKey = 50;
    // Known strings are the usual case, so only the others are recorded.
    struct Other {
      int64_t index;
      bool is_known;
    };
    std::vector<Other> others;
    std::mutex mutex;
    TfParallelFor(ctx)(keys.size(), kNanosecondsPerKey,
                       [&](int64_t begin, int64_t end) {
                         std::vector<Other> here;
                         std::string_view kept;
                         for (int64_t i = begin; i < end; ++i) {
                           if (i + kSlotsAhead < end) {
                             store->PrefetchSlot(keys[i + kSlotsAhead]);
                           }
                           if (i + kTextsAhead < end) {
                             store->PrefetchText(keys[i + kTextsAhead]);
                           }
                           const bool is_known = store->Find(keys[i], &kept);
                           if (!is_known || kept != TextOf(strings[i])) {
                             here.push_back({i, is_known});
                           }
                         }
                         std::lock_guard<std::mutex> lock(mutex);
                         others.insert(others.end(), here.begin(), here.end());
                       });
    // The order of the batch determines which of two strings is kept.
    std::sort(others.begin(), others.end(),
              [](const Other& a, const Other& b) { return a.index < b.index; });
    for (const auto& [i, is_known] : others) {
      std::string_view kept;
      if (is_known && store->Find(keys[i], &kept)) {
        CountCollision(kept, TextOf(strings[i]), store);
      } else {
        items->push_back({keys[i], TextOf(strings[i])});
      }
    }
  }

  // Adds the strings of keys that have a row, and removes strings of keys that
  // have no row. The variables of the keys are locked, so that no key gets or
  // loses a row during this call.
  absl::Status Update(OpKernelContext* ctx, StoreResource* resource,
                      const std::vector<Item>& items) const {
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
    const auto has_row = [&](const std::vector<int64_t>& keys) {
      std::vector<int64_t> rows(keys.size());
      FindKeys(layout, stored, keys, TfParallelFor(ctx), rows);
      return rows;
    };
    std::vector<int64_t> keys;
    keys.reserve(items.size());
    for (const Item& item : items) keys.push_back(item.key);
    const std::vector<int64_t> rows = has_row(keys);
    std::lock_guard<std::mutex> lock(resource->mutex());
    StringStore& store = resource->store();
    int64_t num_added = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i + kSlotsAhead < items.size()) {
        store.PrefetchSlot(items[i + kSlotsAhead].key);
      }
      if (rows[i] == kNoRow) continue;
      std::string_view kept;
      if (store.Find(items[i].key, &kept)) {
        if (kept != items[i].text) CountCollision(kept, items[i].text, &store);
        continue;
      }
      TF_RETURN_IF_ERROR(ToTf(store.Add(items[i].key, items[i].text)));
      ++num_added;
    }
    // Each added string pays for a few slots. All strings of evicted keys are
    // therefore removed after a bounded number of new strings.
    const std::vector<int64_t> visited =
        removes_all_ ? store.Keys() : store.NextKeys(kSlotsPerNew * num_added);
    const std::vector<int64_t> visited_rows = has_row(visited);
    for (size_t i = 0; i < visited.size(); ++i) {
      if (i + kTextsAhead < visited.size() &&
          visited_rows[i + kTextsAhead] == kNoRow) {
        store.PrefetchText(visited[i + kTextsAhead]);
      }
      if (visited_rows[i] == kNoRow) store.Remove(visited[i]);
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
  // The distances at which slots and strings are prefetched, in keys.
  static constexpr int64_t kSlotsAhead = 16;
  static constexpr int64_t kTextsAhead = 8;

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
    for (int64_t i = 0; i < of.size(); ++i) {
      std::string_view text;
      known[i] = resource->store().Find(of[i], &text);
      if (known[i]) out[i].assign(text.data(), text.size());
    }
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
