// The loops over floats, compiled once per instruction set.

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

// What goes around any update rule, in this order: the gradient is clipped,
// the rule runs, the row decays, the row is clipped.
struct Modifiers {
  float clip_gradient_min;
  float clip_gradient_max;
  float weight_decay;  // ready to multiply with: times the rate if so asked
  float clip_weight_min;
  float clip_weight_max;
  // False: one step per contribution, in order, instead of one for their sum.
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

// Pointers are resolved a little ahead of where a loop reads, so that it can
// prefetch: `row_of` has `ahead` more entries than the loop walks over. How far
// pays differs by rows (cc/core/simd/row_tuning.h); where rows are expanded,
// it is this far.
constexpr int64_t kAhead = 16;

// out[o, :] = sum over i in [splits[o], splits[o + 1]) of gain * row, in that
// order, of quantized rows if so asked. `row_of` and `gains` are indexed by
// i - first.
struct LookupArgs {
  RowType row_type = RowType::kFloat32;
  const void* const* row_of;
  const float* gains;  // null: 1 each
  const int64_t* splits;
  int64_t first;
  int64_t begin;  // outputs [begin, end)
  int64_t end;
  int64_t dim;
  int64_t ahead;                               // entries of `row_of` at its end
  float* out;                                  // row 0
  const Quantization* quantization = nullptr;  // null: rows as they are
};

// For the unique rows u in [begin, end): the gradient
//
//   g = sum over k in [splits[u], splits[u + 1]) of gain[k] * *gradient[k]
//
// in that order, where *gradient[k] is gradient_rows[gradient_of[k]]; then one
// step of the update rule on the row and its slot rows, in place.
struct ApplyArgs {
  Optimizer optimizer;
  const float* hyperparameters;
  const Modifiers* modifiers;        // null: none, and accumulate
  float* const* row_of;              // by u - begin
  float* const* slot_of[kMaxSlots];  // by u - begin
  const int64_t* splits;
  const uint32_t* gradient_of;
  const float* gains;  // null: 1 each
  const float* const* gradient_rows;
  int64_t num_positions;  // of `gradient_of`, of all rows
  int64_t begin;
  int64_t end;
  int64_t dim;
  int64_t ahead;            // entries of `row_of` and `slot_of` at their end
  int64_t gradients_ahead;  // as many positions ahead are prefetched
  float* scratch;  // [dim], for the rules that need a whole row at once
};

// Rows of 16 bits as floats, `rows` [num_rows, dim].
struct ExpandArgs {
  RowType row_type;
  const uint16_t* const* row_of;
  int64_t num_rows;
  int64_t dim;
  float* rows;
};

// And back: each value becomes one of its two neighbours, as the noise of its
// row and column has it; beyond the largest finite value, that one.
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

// The best level this CPU has, or the lower one that the environment variable
// TF_LAYOUTMAP_CPU_LEVEL (baseline, avx2, avx512) asks for.
CpuLevel CurrentCpuLevel();
bool CpuHas(CpuLevel level);
const char* CpuLevelName(CpuLevel level);

// `level` must be one that this CPU has.
const RowKernels& RowKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_ROW_KERNELS_H_
