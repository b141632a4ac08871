// Kernels that gather and scatter rows of a table. All shards of the table are
// on one device.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/gather.h"
#include "cc/core/tables/scatter.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/numeric_types.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;

// Base class of both kernels, which reads the partition of the table, and reads
// and checks the ids.
class TableOp : public Kernel {
 public:
  explicit TableOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetPlacement(ctx, &placement_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
  }

 protected:
  absl::Status ReadInputs(OpKernelContext* ctx, RowPartition* partition,
                          const Tensor** ids) const {
    TF_RETURN_IF_ERROR(ctx->input("ids", ids));
    TF_RETURN_IF_ERROR(GetPartition(ctx, placement_, partition));
    if ((*ids)->NumElements() > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat("`ids` must have at most 2^31 - 1 values. Received: ",
                       (*ids)->NumElements()));
    }
    const int64_t num_rows = partition->num_rows();
    return (*ids)->dtype() == tensorflow::DT_INT32
               ? ToTf(CheckIds(View<int32_t>(**ids), num_rows, table_))
               : ToTf(CheckIds(View<int64_t>(**ids), num_rows, table_));
  }

  Placement placement_;
  std::string table_;
};

template <typename Tid>
class GatherRowsOp : public TableOp {
 public:
  explicit GatherRowsOp(OpKernelConstruction* ctx) : TableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

  void Run(OpKernelContext* ctx) override {
    RowPartition partition;
    const Tensor* ids;
    OP_REQUIRES_OK(ctx, ReadInputs(ctx, &partition, &ids));
    LockedShards shards;
    OP_REQUIRES_OK(ctx,
                   shards.Lock(ctx, {"shards"}, LockedShards::Mode::kShared));
    TensorShape row_shape;
    OP_REQUIRES_OK(ctx, shards.FirstRowShape(table_, &row_shape));
    TensorShape shape = ids->shape();
    OP_REQUIRES_OK(ctx, shape.AppendShapeWithStatus(row_shape));

    if (dtype_ == tensorflow::DT_STRING) {
      ShardedView<const tstring> table;
      OP_REQUIRES_OK(ctx, shards.View(0, table_, partition, row_shape, &table));
      Tensor* rows = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output("rows", shape, &rows));
      GatherRows(table, View<Tid>(*ids), TfParallelFor(ctx),
                 rows->flat<tstring>().data());
      return;
    }
    ShardedView<const char> table;
    OP_REQUIRES_OK(
        ctx, shards.ByteView(0, table_, partition, dtype_, row_shape, &table));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("rows", shape, &rows));
    GatherRows(table, View<Tid>(*ids), TfParallelFor(ctx),
               static_cast<char*>(rows->data()));
  }

 private:
  tensorflow::DataType dtype_;
};

// Divides a value of a row by a value of an update. Integer quotients are
// truncated toward zero. If the lowest integer is divided by -1, the result
// wraps around. A division instruction would end the process in this case.
template <typename T>
T Quotient(T a, T b) {
  if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    if (b == T{-1}) {
      return static_cast<T>(std::make_unsigned_t<T>{0} -
                            static_cast<std::make_unsigned_t<T>>(a));
    }
  }
  return a / b;
}

template <typename T>
constexpr bool kIsOrdered = !std::is_same_v<T, tensorflow::complex64> &&
                            !std::is_same_v<T, tensorflow::complex128>;

// Combines a row of `dim` values with an update. A pointer to a function is
// called for each row, so that the compiler creates the loops over ids and
// shards once per dtype. With a separate loop for each verb, compiling this
// file took 85 s.
template <typename T>
using RowWriter = void (*)(T* row, const T* value, int64_t dim);

// The update has the shape of a row.
template <typename T, typename Combine>
void CombineRow(T* __restrict row, const T* __restrict value, int64_t dim) {
  for (int64_t c = 0; c < dim; ++c) row[c] = Combine()(row[c], value[c]);
}

// The update is a scalar.
template <typename T, typename Combine>
void CombineScalar(T* row, const T* value, int64_t dim) {
  for (int64_t c = 0; c < dim; ++c) row[c] = Combine()(row[c], *value);
}

template <typename T>
void CopyRow(T* row, const T* value, int64_t dim) {
  std::copy_n(value, dim, row);
}

template <typename T>
void FillRow(T* row, const T* value, int64_t dim) {
  std::fill_n(row, dim, *value);
}

struct Plus {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Minus {
  template <typename T>
  T operator()(T a, T b) const {
    return a - b;
  }
};
struct Times {
  template <typename T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
struct DividedBy {
  template <typename T>
  T operator()(T a, T b) const {
    return Quotient(a, b);
  }
};
struct Least {
  template <typename T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Largest {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// Returns null if the dtype does not support the verb.
template <typename T>
RowWriter<T> WriterOf(const std::string& verb, bool broadcast) {
  if (verb == "update") return broadcast ? FillRow<T> : CopyRow<T>;
  if constexpr (!std::is_same_v<T, tstring> && !std::is_same_v<T, bool>) {
    const auto writer = [&](auto combine) -> RowWriter<T> {
      using Combine = decltype(combine);
      return broadcast ? CombineScalar<T, Combine> : CombineRow<T, Combine>;
    };
    if (verb == "add") return writer(Plus());
    if (verb == "sub") return writer(Minus());
    if (verb == "mul") return writer(Times());
    if (verb == "div") return writer(DividedBy());
    if constexpr (kIsOrdered<T>) {
      if (verb == "min") return writer(Least());
      if (verb == "max") return writer(Largest());
    }
  }
  return nullptr;
}

template <typename T>
class ScatterRowsOp : public TableOp {
 public:
  explicit ScatterRowsOp(OpKernelConstruction* ctx) : TableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("verb", &verb_));
    constexpr bool kIsNumber =
        !std::is_same_v<T, tstring> && !std::is_same_v<T, bool>;
    const bool needs_order = verb_ == "min" || verb_ == "max";
    OP_REQUIRES(
        ctx,
        verb_ == "update" || (kIsNumber && (!needs_order || kIsOrdered<T>)),
        absl::InvalidArgumentError(absl::StrCat(
            "`scatter_", verb_, "` does not support dtype ",
            tensorflow::DataTypeString(tensorflow::DataTypeToEnum<T>::value),
            " (table '", table_, "')")));
  }

  void Run(OpKernelContext* ctx) override {
    RowPartition partition;
    const Tensor* ids;
    const Tensor* updates;
    OP_REQUIRES_OK(ctx, ReadInputs(ctx, &partition, &ids));
    OP_REQUIRES_OK(ctx, ctx->input("updates", &updates));
    LockedShards shards;
    OP_REQUIRES_OK(
        ctx, shards.Lock(ctx, {"shards"}, LockedShards::Mode::kExclusive));
    TensorShape row_shape;
    OP_REQUIRES_OK(ctx, shards.FirstRowShape(table_, &row_shape));
    TensorShape expected = ids->shape();
    OP_REQUIRES_OK(ctx, expected.AppendShapeWithStatus(row_shape));
    const bool broadcast = updates->dims() == 0;
    OP_REQUIRES(ctx, broadcast || updates->shape() == expected,
                absl::InvalidArgumentError(absl::StrCat(
                    "`updates` for table '", table_, "' must be a scalar or ",
                    expected.DebugString(), ". Received: shape ",
                    updates->shape().DebugString())));
    const Span<const T> values = View<T>(*updates);
    if constexpr (std::is_integral_v<T>) {
      OP_REQUIRES(
          ctx,
          verb_ != "div" ||
              std::find(values.begin(), values.end(), T{0}) == values.end(),
          absl::InvalidArgumentError(absl::StrCat(
              "`scatter_div` of integers needs updates without 0 (table '",
              table_, "')")));
    }
    ShardedView<T> table;
    OP_REQUIRES_OK(
        ctx, shards.MutableView(ctx, 0, table_, partition, row_shape, &table));
    // All ids are converted to int64, so that the compiler creates the loops
    // for only one dtype of ids.
    std::vector<int64_t> widened;
    Span<const int64_t> rows;
    if (ids->dtype() == tensorflow::DT_INT32) {
      const Span<const int32_t> narrow = View<int32_t>(*ids);
      widened.assign(narrow.begin(), narrow.end());
      rows = widened;
    } else {
      rows = View<int64_t>(*ids);
    }
    Run(table, rows, values.data(), broadcast, NumWorkers(ctx),
        TfParallelFor(ctx));
  }

 private:
  void Run(const ShardedView<T>& table, Span<const int64_t> ids,
           const T* values, bool broadcast, int num_workers,
           const ParallelFor& parallel_for) const {
    const int64_t dim = table.dim;
    const RowWriter<T> writer = WriterOf<T>(verb_, broadcast);
    if (writer == nullptr) return;  // The constructor has checked the verb.
    ScatterRows(
        table, ids, values, broadcast, verb_ == "update",
        [=](T* row, const T* value) { writer(row, value, dim); }, num_workers,
        parallel_for);
  }

  std::string verb_;
};

LM_REGISTER_ID_KERNELS("GatherRows", GatherRowsOp);

#define LM_REGISTER(T)                                     \
  REGISTER_KERNEL_BUILDER(Name("LayoutMap>ScatterRows")    \
                              .Device(DEVICE_CPU)          \
                              .TypeConstraint<T>("dtype"), \
                          ScatterRowsOp<T>);
TF_CALL_NUMBER_TYPES(LM_REGISTER)
TF_CALL_bool(LM_REGISTER) TF_CALL_tstring(LM_REGISTER)
#undef LM_REGISTER

}  // namespace
}  // namespace layoutmap
