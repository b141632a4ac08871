// Kernels that process rows of floats. They are compiled once per instruction
// set.

#ifndef TF_LAYOUTMAP_CORE_SIMD_ROW_KERNELS_H_
#define TF_LAYOUTMAP_CORE_SIMD_ROW_KERNELS_H_

#include <cstdint>

#include "cc/core/base/row_type.h"

namespace layoutmap {

enum class CpuLevel { kBaseline, kAvx2, kAvx512 };

enum class Optimizer {
  kNone,
  kSgd,
  kAdagrad,
  kAdagradPerId,
  kAdagradMomentum,
  kAdam,
  kAdamPerId,
  kFtrl,
  kFtrlPerId,
  kMomentum,
  kRmsprop,
  kRmspropPerId,
  kRowwiseAdagrad,
  kLamb
};

constexpr int kMaxSlots = 3;

// Operations before and after an update rule. A step clips the gradient,
// applies the rule, applies the weight decay, and clips the row, in this order.
struct Modifiers {
  float clip_gradient_min;
  float clip_gradient_max;
  // This value already includes the learning rate if
  // `multiply_weight_decay_by_lr` is set.
  float weight_decay;
  float clip_weight_min;
  float clip_weight_max;
  // If true, the rule applies one step for the sum of a row's contributions. If
  // false, it applies one step per contribution, in order.
  bool accumulate;
};

// Rounds x to the nearest value of a set of equally spaced values:
//
//   floor((clip(x, lower, upper) - lower) / quantum + 0.5) * quantum + lower
//
// NaN stays NaN.
struct Quantization {
  float lower;
  float upper;
  float quantum;
};

// Prefetch distance of the loops that expand rows. Lookups and updates use the
// distances in cc/core/simd/row_tuning.h. The caller of an update or an
// expansion computes the pointers to the rows, and `row_of` has `ahead` more
// elements than the kernel processes, so that the kernel can prefetch rows.
constexpr int64_t kAhead = 16;

// Arguments of a lookup:
//
//   out[o, :] = sum over i in [splits[o], splits[o + 1]) of gain * row
//
// The rows are added in the order of i. If `splits` is null, `even` contains
// the range of i. If `quantization` is not null, the kernel quantizes each row
// before it adds the row.
struct LookupArgs {
  RowType row_type = RowType::kFloat32;
  // Row i is row ids[i] of the contiguous rows at `table`. If `table` is null,
  // row i is at row_of[i - first]. With `quantization`, `table` must be null.
  const void* table = nullptr;
  const void* ids = nullptr;
  IdType id_type = IdType::kUint32;
  const void* const* row_of = nullptr;
  // One gain per id, with the index i, or one gain per output, with the index
  // o. If both are null, all gains are 1.
  const float* gains = nullptr;
  const float* output_gains = nullptr;
  const int64_t* splits = nullptr;
  int64_t first = 0;
  EvenIds even;
  // The kernel computes the outputs [begin, end).
  int64_t begin;
  int64_t end;
  int64_t dim;
  // Prefetch distance in rows. The kernel prefetches only rows i < `known`.
  // With `even`, the distance is in outputs, and `known` is not used.
  int64_t ahead;
  int64_t known = 0;
  // Pointer to row 0 of the output.
  float* out;
  // If null, rows are not quantized.
  const Quantization* quantization = nullptr;
};

// The arguments of the update kernel. For each unique row u in [begin, end),
// the kernel computes the gradient
//
//   g = sum over k in [splits[u], splits[u + 1]) of gain[k] * *gradient[k]
//
// The gradients are added in the order of k, and *gradient[k] is
// gradient_rows[gradient_of[k]]. The kernel then applies one step of the update
// rule to the row and its slot rows, in place.
struct ApplyArgs {
  Optimizer optimizer;
  const float* hyperparameters;
  // If null, there are no modifiers, and `accumulate` is true.
  const Modifiers* modifiers;
  // The index of `row_of` and of each slot_of[j] is u - begin.
  float* const* row_of;
  float* const* slot_of[kMaxSlots];
  const int64_t* splits;
  const uint32_t* gradient_of;
  const float* gains;  // If null, all gains are 1.
  const float* const* gradient_rows;
  // Size of `gradient_of`, which covers all rows.
  int64_t num_positions;
  int64_t begin;
  int64_t end;
  int64_t dim;
  // Number of additional elements of `row_of` and `slot_of`.
  int64_t ahead;
  // Prefetch distance of gradients, in positions.
  int64_t gradients_ahead;
  // Temporary memory, [dim], for rules that need the full gradient row.
  float* scratch;
};

// Arguments of the kernel that converts 16-bit rows to floats. `rows` is
// [num_rows, dim].
struct ExpandArgs {
  RowType row_type;
  const uint16_t* const* row_of;
  int64_t num_rows;
  int64_t dim;
  float* rows;
};

// Arguments of the kernel that converts floats to 16-bit rows. Each value is
// rounded to one of the two nearest 16-bit values. The noise of the row and the
// column selects the value. If a value exceeds the largest finite value, it is
// limited to the largest finite value.
struct RoundArgs {
  RowType row_type;
  const float* rows;
  // One key per row.
  const uint64_t* noise_keys;
  int64_t num_rows;
  int64_t dim;
  uint16_t* const* row_of;
};

struct RowKernels {
  void (*lookup)(const LookupArgs& args);
  void (*apply)(const ApplyArgs& args);
  void (*expand)(const ExpandArgs& args);
  void (*round)(const RoundArgs& args);
};

// Returns the highest level that this CPU supports. The environment variable
// TF_LAYOUTMAP_CPU_LEVEL (baseline, avx2, avx512) can select a lower level.
CpuLevel CurrentCpuLevel();
bool CpuHas(CpuLevel level);
const char* CpuLevelName(CpuLevel level);

// Returns the kernels for `level`, which this CPU must support.
const RowKernels& RowKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_ROW_KERNELS_H_
