// Kernels over rows of floats, compiled once per instruction set.

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
  kAdagradMomentum,
  kAdam,
  kFtrl,
  kRowwiseAdagrad,
  kLamb
};

constexpr int kMaxSlots = 3;

// Operations around an update rule, in this order: the gradient is clipped, the
// rule is applied, the row decays, the row is clipped.
struct Modifiers {
  float clip_gradient_min;
  float clip_gradient_max;
  float weight_decay;  // multiplied by the learning rate if so configured
  float clip_weight_min;
  float clip_weight_max;
  // If false, one step is applied per contribution, in order, instead of one
  // step for the sum of the contributions.
  bool accumulate;
};

// Rounds x to the nearest of equally spaced values:
//
//   floor((clip(x, lower, upper) - lower) / quantum + 0.5) * quantum + lower
//
// NaN stays NaN.
struct Quantization {
  float lower;
  float upper;
  float quantum;
};

// The caller resolves row pointers ahead of the loop, so that the loop can
// prefetch: `row_of` has `ahead` more elements than the loop processes. The
// best distance depends on the rows (cc/core/simd/row_tuning.h); loops that
// expand rows use this constant.
constexpr int64_t kAhead = 16;

// Arguments of a lookup:
//
//   out[o, :] = sum over i in [splits[o], splits[o + 1]) of gain * row
//
// in that order. Rows are quantized first if `quantization` is not null.
// `row_of` and `gains` are indexed by i - first.
struct LookupArgs {
  RowType row_type = RowType::kFloat32;
  const void* const* row_of;
  const float* gains;  // null: all gains are 1
  const int64_t* splits;
  int64_t first;
  int64_t begin;  // outputs [begin, end)
  int64_t end;
  int64_t dim;
  int64_t ahead;  // additional elements of `row_of`
  float* out;     // row 0 of the output
  const Quantization* quantization = nullptr;  // null: rows are not quantized
};

// Arguments of an update. For each unique row u in [begin, end), computes the
// gradient
//
//   g = sum over k in [splits[u], splits[u + 1]) of gain[k] * *gradient[k]
//
// in that order, where *gradient[k] is gradient_rows[gradient_of[k]]. Then
// applies one step of the update rule to the row and its slot rows, in place.
struct ApplyArgs {
  Optimizer optimizer;
  const float* hyperparameters;
  const Modifiers* modifiers;        // null: no modifiers, accumulate
  float* const* row_of;              // indexed by u - begin
  float* const* slot_of[kMaxSlots];  // indexed by u - begin
  const int64_t* splits;
  const uint32_t* gradient_of;
  const float* gains;  // null: all gains are 1
  const float* const* gradient_rows;
  int64_t num_positions;  // size of `gradient_of`, which covers all rows
  int64_t begin;
  int64_t end;
  int64_t dim;
  int64_t ahead;            // additional elements of `row_of` and `slot_of`
  int64_t gradients_ahead;  // prefetch distance, in positions
  float* scratch;           // [dim], for rules that need the full gradient row
};

// Arguments of a conversion of 16-bit rows to floats. `rows` is [num_rows,
// dim].
struct ExpandArgs {
  RowType row_type;
  const uint16_t* const* row_of;
  int64_t num_rows;
  int64_t dim;
  float* rows;
};

// Arguments of a conversion of floats to 16-bit rows. Each value is rounded to
// one of its two neighbors, selected by the noise of its row and column. Values
// beyond the largest finite value are limited to it.
struct RoundArgs {
  RowType row_type;
  const float* rows;
  const uint64_t* noise_keys;  // one per row
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

// Returns the highest level that this CPU supports, limited by the environment
// variable TF_LAYOUTMAP_CPU_LEVEL (baseline, avx2, avx512).
CpuLevel CurrentCpuLevel();
bool CpuHas(CpuLevel level);
const char* CpuLevelName(CpuLevel level);

// Returns the kernels for `level`, which this CPU must support.
const RowKernels& RowKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_ROW_KERNELS_H_
