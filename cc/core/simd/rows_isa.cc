// Implementation of the row kernels. This file is compiled once per instruction
// set, and the BUILD file sets LM_ISA and the compiler flags. This file must
// not include standard library headers. The linker keeps only one copy of each
// inline function. The linker could select a copy that was compiled with AVX,
// which some CPUs do not support.
//
// The loops keep the sums of an output in registers until all ids are
// processed. For a simpler loop, GCC stores the sums to memory after every id,
// which is four times slower.

#include "cc/core/optimizers/adagrad.h"
#include "cc/core/optimizers/adagrad_momentum.h"
#include "cc/core/optimizers/adagrad_per_id.h"
#include "cc/core/optimizers/adam.h"
#include "cc/core/optimizers/ftrl.h"
#include "cc/core/optimizers/lamb.h"
#include "cc/core/optimizers/momentum.h"
#include "cc/core/optimizers/rmsprop.h"
#include "cc/core/optimizers/rowwise_adagrad.h"
#include "cc/core/optimizers/sgd.h"
#include "cc/core/simd/columns.h"
#include "cc/core/simd/half.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {
namespace {

constexpr int64_t kFloatsPerLine = 16;

// Selects the second-level cache for prefetches. The comment in
// cc/core/base/row_queue.h explains the reason.
constexpr int kSecondLevel = 2;

template <int kForWrite>
inline void PrefetchColumns(const float* row, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kFloatsPerLine) {
    __builtin_prefetch(row + c, kForWrite, kSecondLevel);
  }
}
template <int kForWrite>
inline void PrefetchColumns(const uint16_t* row, int64_t columns) {
  for (int64_t c = 0; c < columns; c += 2 * kFloatsPerLine) {
    __builtin_prefetch(row + c, kForWrite, kSecondLevel);
  }
}

// The formats of stored rows that a kernel can read.
struct Float32 {
  typedef float Stored;
  static void Read(const float* p, float* x) { *x = *p; }
  static void Read(const float* p, Vector* x) { *x = Load(p); }
};

template <typename Half>
struct Halved {
  typedef uint16_t Stored;
  static void Read(const uint16_t* p, float* x) {
    uint32_t half;
    ReadHalf(p, &half);
    *x = Half::Expand(half);
  }
  static void Read(const uint16_t* p, Vector* x) {
    Words half;
    ReadHalf(p, &half);
    *x = Half::Expand(half);
  }
};

// Operations on a value before it is added to the sum.
struct Unchanged {
  template <typename V>
  V operator()(V x) const {
    return x;
  }
};

struct Quantize {
  template <typename V>
  V operator()(V x) const {
    // The conversion to an integer is not defined for NaN. The code replaces
    // NaN before the conversion and restores it afterwards.
    const V number = x == x ? x : V{};
    const V clipped = Clip(number, Fill<V>(q.lower), Fill<V>(q.upper));
    const V bucket = Floor((clipped - q.lower) / q.quantum + 0.5f);
    return x == x ? bucket * q.quantum + q.lower : x;
  }

  Quantization q;
};

// The rows of a lookup, whose addresses are in an array.
template <typename Type>
struct RowsAt {
  explicit RowsAt(const LookupArgs& a) : row_of(a.row_of), first(a.first) {}
  const typename Type::Stored* operator()(int64_t i) const {
    return static_cast<const typename Type::Stored*>(row_of[i - first]);
  }

  const void* const* row_of;
  int64_t first;
};

// The rows of a lookup in a table with contiguous rows.
template <typename Type, typename Id>
struct RowsOfTable {
  explicit RowsOfTable(const LookupArgs& a)
      : table(static_cast<const typename Type::Stored*>(a.table)),
        ids(static_cast<const Id*>(a.ids)),
        dim(a.dim) {}
  const typename Type::Stored* operator()(int64_t i) const {
    return table + static_cast<int64_t>(ids[i]) * dim;
  }

  const typename Type::Stored* table;
  const Id* ids;
  int64_t dim;
};

// The ids [begin, end) of one output.
struct OutputIds {
  OutputIds(const LookupArgs& a, int64_t o) {
    // Without later rows, the loop prefetches the current row.
    if (a.splits != nullptr) {
      begin = a.splits[o];
      end = a.splits[o + 1];
      ahead = end + a.ahead <= a.known ? a.ahead : 0;
    } else {
      begin = a.even.first + o * a.even.stride;
      end = begin + a.even.size;
      ahead = o + a.ahead < a.end ? a.ahead * a.even.stride : 0;
    }
    if (a.output_gains != nullptr) {
      gains = a.output_gains + o;
      gain_step = 0;
    } else if (a.gains != nullptr) {
      gains = a.gains;
    }
  }
  float gain(int64_t i) const { return gains[i * gain_step]; }

  int64_t begin;
  int64_t end;
  int64_t ahead;
  const float* gains = nullptr;
  int64_t gain_step = 1;
};

// Sums the columns that start at column c over the rows of an output. The
// number of columns is the width of `sum`.
template <typename Type, int kRegisters, typename Change, typename Rows>
inline void SumRows(const Change& change, const Rows& rows,
                    const OutputIds& ids, int64_t c, Vector* sum) {
  for (int r = 0; r < kRegisters; ++r) sum[r] = Vector{};
  for (int64_t i = ids.begin; i < ids.end; ++i) {
    PrefetchColumns<0>(rows(i + ids.ahead) + c, kRegisters * kLanes);
    const typename Type::Stored* const row = rows(i) + c;
    Vector value;
    if (ids.gains == nullptr) {
      for (int r = 0; r < kRegisters; ++r) {
        Type::Read(row + r * kLanes, &value);
        sum[r] += change(value);
      }
    } else {
      const float gain = ids.gain(i);
      for (int r = 0; r < kRegisters; ++r) {
        Type::Read(row + r * kLanes, &value);
        sum[r] += gain * change(value);
      }
    }
  }
}

template <typename Type, int kRegisters, typename Change, typename Rows>
inline int64_t LookupColumns(const Change& change, const Rows& rows,
                             const OutputIds& ids, int64_t c, int64_t dim,
                             float* out) {
  constexpr int64_t kWidth = kRegisters * kLanes;
  for (; c + kWidth <= dim; c += kWidth) {
    Vector sum[kRegisters];
    SumRows<Type, kRegisters>(change, rows, ids, c, sum);
    for (int r = 0; r < kRegisters; ++r) Store(out + c + r * kLanes, sum[r]);
  }
  return c;
}

// Processes half a register of columns if that many columns remain.
template <typename Type>
struct HalfRegister {
  template <typename Change, typename Rows>
  static int64_t Lookup(const Change&, const Rows&, const OutputIds&, int64_t c,
                        int64_t, float*) {
    return c;
  }
};
#if defined(__AVX512F__)
template <>
struct HalfRegister<Float32> {
  template <typename Change, typename Rows>
  static int64_t Lookup(const Change& change, const Rows& rows,
                        const OutputIds& ids, int64_t c, int64_t dim,
                        float* out) {
    if (c + kHalfLanes > dim) return c;
    HalfVector sum = {};
    for (int64_t i = ids.begin; i < ids.end; ++i) {
      PrefetchColumns<0>(rows(i + ids.ahead) + c, kHalfLanes);
      HalfVector value;
      Read(rows(i) + c, &value);
      sum += (ids.gains == nullptr ? 1.0f : ids.gain(i)) * change(value);
    }
    Write(out + c, sum);
    return c + kHalfLanes;
  }
};
#endif

template <typename Type, typename Change, typename Rows>
void LookupOutputs(const Change& change, const Rows& rows,
                   const LookupArgs& a) {
  for (int64_t o = a.begin; o < a.end; ++o) {
    const OutputIds ids(a, o);
    float* out = a.out + o * a.dim;
    int64_t c = 0;
    c = LookupColumns<Type, 8>(change, rows, ids, c, a.dim, out);
    c = LookupColumns<Type, 4>(change, rows, ids, c, a.dim, out);
    c = LookupColumns<Type, 2>(change, rows, ids, c, a.dim, out);
    c = LookupColumns<Type, 1>(change, rows, ids, c, a.dim, out);
    c = HalfRegister<Type>::Lookup(change, rows, ids, c, a.dim, out);
    for (; c < a.dim; ++c) {
      float sum = 0;
      for (int64_t i = ids.begin; i < ids.end; ++i) {
        float value;
        Type::Read(rows(i) + c, &value);
        sum += (ids.gains == nullptr ? 1.0f : ids.gain(i)) * change(value);
      }
      out[c] = sum;
    }
  }
}

template <typename Type>
void LookupType(const LookupArgs& a) {
  if (a.quantization != nullptr) {
    return LookupOutputs<Type>(Quantize{*a.quantization}, RowsAt<Type>(a), a);
  }
  if (a.table == nullptr) {
    return LookupOutputs<Type>(Unchanged(), RowsAt<Type>(a), a);
  }
  switch (a.id_type) {
    case IdType::kUint32:
      return LookupOutputs<Type>(Unchanged(), RowsOfTable<Type, uint32_t>(a),
                                 a);
    case IdType::kInt32:
      return LookupOutputs<Type>(Unchanged(), RowsOfTable<Type, int32_t>(a), a);
    case IdType::kInt64:
      return LookupOutputs<Type>(Unchanged(), RowsOfTable<Type, int64_t>(a), a);
  }
}

void Lookup(const LookupArgs& a) {
  switch (a.row_type) {
    case RowType::kFloat32:
      return LookupType<Float32>(a);
    case RowType::kBfloat16:
      return LookupType<Halved<Bfloat16>>(a);
    case RowType::kFloat16:
      return LookupType<Halved<Float16>>(a);
  }
}

template <typename Half>
void ExpandType(const ExpandArgs& a) {
  for (int64_t i = 0; i < a.num_rows; ++i) {
    PrefetchColumns<1>(a.row_of[i + kAhead], a.dim);
    float* const out = a.rows + i * a.dim;
    ForColumns(a.dim, [&](int64_t c, auto x) {
      Halved<Half>::Read(a.row_of[i] + c, &x);
      Write(out + c, x);
    });
  }
}

void Expand(const ExpandArgs& a) {
  if (a.row_type == RowType::kBfloat16) return ExpandType<Bfloat16>(a);
  ExpandType<Float16>(a);
}

template <typename Half>
void RoundType(const RoundArgs& a) {
  const NoisePlaces places;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const float* const row = a.rows + i * a.dim;
    ForColumns(a.dim, [&](int64_t c, auto value) {
      Read(row + c, &value);
      const auto noise = Noise(a.noise_keys[i], static_cast<uint32_t>(c),
                               places.Of(BitsOf(value)));
      WriteHalf(a.row_of[i] + c, Half::Round(value, noise));
    });
  }
}

void Round(const RoundArgs& a) {
  if (a.row_type == RowType::kBfloat16) return RoundType<Bfloat16>(a);
  RoundType<Float16>(a);
}

// One unique row, with the range of its positions and with pointers to the row
// and its slot rows.
struct RowStep {
  const ApplyArgs& a;
  int64_t k_begin;
  int64_t k_end;
  float* row;
  float* slots[kMaxSlots];

  const float* gradient(int64_t k) const {
    return a.gradient_rows[a.gradient_of[k]];
  }
  float gain(int64_t k) const { return a.gains == nullptr ? 1.0f : a.gains[k]; }
  // Returns the gradient to prefetch at position k: the gradient
  // `gradients_ahead` positions later, or the last gradient.
  const float* gradient_ahead(int64_t k) const {
    const int64_t later = k + a.gradients_ahead;
    return gradient(later < a.num_positions ? later : a.num_positions - 1);
  }
};

template <typename Rule, typename V>
inline void Update(const Rule& rule, const RowStep& s, int64_t c, V gradient) {
  V row, slots[Rule::kNumSlots + 1];
  Read(s.row + c, &row);
  for (int j = 0; j < Rule::kNumSlots; ++j) Read(s.slots[j] + c, &slots[j]);
  rule(gradient, &row, slots);
  Write(s.row + c, row);
  for (int j = 0; j < Rule::kNumSlots; ++j) Write(s.slots[j] + c, slots[j]);
}

// An update rule that also applies its modifiers.
template <typename Rule>
struct Modified {
  static constexpr int kNumSlots = Rule::kNumSlots;

  template <typename V>
  void operator()(V g, V* p, V* slots) const {
    g = Clip(g, Fill<V>(m.clip_gradient_min), Fill<V>(m.clip_gradient_max));
    rule(g, p, slots);
    *p -= m.weight_decay * *p;
    *p = Clip(*p, Fill<V>(m.clip_weight_min), Fill<V>(m.clip_weight_max));
  }

  Rule rule;
  Modifiers m;
};

// Sums the row's gradients at positions [k, k_end), for the columns from c on
// that fit in kRegisters registers.
template <int kRegisters>
inline void FoldGradients(const RowStep& s, int64_t k, int64_t k_end, int64_t c,
                          Vector* sum) {
  for (int r = 0; r < kRegisters; ++r) sum[r] = Vector{};
  for (; k < k_end; ++k) {
    const float* gradient = s.gradient(k) + c;
    const float gain = s.gain(k);
    PrefetchColumns<0>(s.gradient_ahead(k) + c, kRegisters * kLanes);
    for (int r = 0; r < kRegisters; ++r) {
      sum[r] += gain * Load(gradient + r * kLanes);
    }
  }
}

template <int kRegisters, typename Rule>
inline int64_t ApplyColumns(const Rule& rule, const RowStep& s, int64_t k,
                            int64_t k_end, int64_t c) {
  constexpr int64_t kWidth = kRegisters * kLanes;
  for (; c + kWidth <= s.a.dim; c += kWidth) {
    Vector sum[kRegisters];
    FoldGradients<kRegisters>(s, k, k_end, c, sum);
    for (int r = 0; r < kRegisters; ++r) {
      Update<Rule, Vector>(rule, s, c + r * kLanes, sum[r]);
    }
  }
  return c;
}

#if defined(__AVX512F__)
// Processes half a register of columns if that many columns remain.
template <typename Rule>
inline int64_t ApplyHalf(const Rule& rule, const RowStep& s, int64_t k,
                         int64_t k_end, int64_t c) {
  if (c + kHalfLanes > s.a.dim) return c;
  HalfVector sum = {};
  for (; k < k_end; ++k) {
    PrefetchColumns<0>(s.gradient_ahead(k) + c, kHalfLanes);
    HalfVector gradient;
    Read(s.gradient(k) + c, &gradient);
    sum += s.gain(k) * gradient;
  }
  Update<Rule, HalfVector>(rule, s, c, sum);
  return c + kHalfLanes;
}
#else
template <typename Rule>
inline int64_t ApplyHalf(const Rule&, const RowStep&, int64_t, int64_t,
                         int64_t c) {
  return c;
}
#endif

template <typename Rule>
inline void ApplyRow(const Rule& rule, const RowStep& s, int64_t k,
                     int64_t k_end) {
  int64_t c = 0;
  c = ApplyColumns<8>(rule, s, k, k_end, c);
  c = ApplyColumns<4>(rule, s, k, k_end, c);
  c = ApplyColumns<2>(rule, s, k, k_end, c);
  c = ApplyColumns<1>(rule, s, k, k_end, c);
  c = ApplyHalf(rule, s, k, k_end, c);
  for (; c < s.a.dim; ++c) {
    float sum = 0;
    for (int64_t i = k; i < k_end; ++i) sum += s.gain(i) * s.gradient(i)[c];
    Update<Rule, float>(rule, s, c, sum);
  }
}

template <typename Rule>
void ApplyRule(const Rule& rule, bool accumulate, const ApplyArgs& a) {
  for (int64_t u = a.begin; u < a.end; ++u) {
    const int64_t i = u - a.begin;
    RowStep s = {a, a.splits[u], a.splits[u + 1], a.row_of[i], {}};
    PrefetchColumns<1>(a.row_of[i + a.ahead], a.dim);
    for (int j = 0; j < Rule::kNumSlots; ++j) {
      s.slots[j] = a.slot_of[j][i];
      PrefetchColumns<1>(a.slot_of[j][i + a.ahead], a.dim);
    }
    if (accumulate) {
      ApplyRow(rule, s, s.k_begin, s.k_end);
    } else {
      for (int64_t k = s.k_begin; k < s.k_end; ++k) ApplyRow(rule, s, k, k + 1);
    }
  }
}

// Applies a rule that needs the gradient of the full row before it updates any
// column.
template <typename Rule>
inline void ApplyFullRow(const Rule& rule, const RowStep& s, int64_t k,
                         int64_t k_end) {
  float* const g = s.a.scratch;
  const Modifiers* const m = s.a.modifiers;
  ForColumns(s.a.dim, [&](int64_t c, auto x) {
    auto value = x;
    for (int64_t i = k; i < k_end; ++i) {
      Read(s.gradient(i) + c, &value);
      x += s.gain(i) * value;
    }
    if (m != nullptr) {
      x = Clip(x, Fill<decltype(x)>(m->clip_gradient_min),
               Fill<decltype(x)>(m->clip_gradient_max));
    }
    Write(g + c, x);
  });
  rule(s.a.dim, g, s.row, s.slots);
  if (m == nullptr) return;
  ForColumns(s.a.dim, [&](int64_t c, auto x) {
    Read(s.row + c, &x);
    x -= m->weight_decay * x;
    Write(s.row + c, Clip(x, Fill<decltype(x)>(m->clip_weight_min),
                          Fill<decltype(x)>(m->clip_weight_max)));
  });
}

template <typename Rule>
void RunFullRows(const ApplyArgs& a) {
  const Rule rule(a.hyperparameters);
  const bool accumulate = a.modifiers == nullptr || a.modifiers->accumulate;
  for (int64_t u = a.begin; u < a.end; ++u) {
    const int64_t i = u - a.begin;
    RowStep s = {a, a.splits[u], a.splits[u + 1], a.row_of[i], {}};
    PrefetchColumns<1>(a.row_of[i + a.ahead], a.dim);
    for (int j = 0; j < Rule::kNumSlots; ++j) {
      s.slots[j] = a.slot_of[j][i];
      PrefetchColumns<1>(a.slot_of[j][i + a.ahead],
                         Rule::kIsPerRow[j] ? 1 : a.dim);
    }
    if (accumulate) {
      ApplyFullRow(rule, s, s.k_begin, s.k_end);
    } else {
      for (int64_t k = s.k_begin; k < s.k_end; ++k) {
        ApplyFullRow(rule, s, k, k + 1);
      }
    }
  }
}

// Runs a rule that takes the sum of a row's gradients and the sum of their
// squares. Such a rule has no modifiers.
template <typename Rule>
void RunWithSquares(const ApplyArgs& a) {
  const Rule rule(a.hyperparameters);
  for (int64_t u = a.begin; u < a.end; ++u) {
    const int64_t i = u - a.begin;
    RowStep s = {a, a.splits[u], a.splits[u + 1], a.row_of[i], {}};
    PrefetchColumns<1>(a.row_of[i + a.ahead], a.dim);
    for (int j = 0; j < Rule::kNumSlots; ++j) {
      s.slots[j] = a.slot_of[j][i];
      PrefetchColumns<1>(a.slot_of[j][i + a.ahead], a.dim);
    }
    ForColumns(a.dim, [&](int64_t c, auto sum) {
      auto squares = sum, value = sum;
      for (int64_t k = s.k_begin; k < s.k_end; ++k) {
        PrefetchColumns<0>(s.gradient_ahead(k) + c,
                           sizeof(sum) / sizeof(float));
        Read(s.gradient(k) + c, &value);
        value *= s.gain(k);
        sum += value;
        squares += value * value;
      }
      decltype(sum) slots[Rule::kNumSlots];
      Read(s.row + c, &value);
      for (int j = 0; j < Rule::kNumSlots; ++j) Read(s.slots[j] + c, &slots[j]);
      rule(sum, squares, &value, slots);
      Write(s.row + c, value);
      for (int j = 0; j < Rule::kNumSlots; ++j) Write(s.slots[j] + c, slots[j]);
    });
  }
}

template <typename Rule>
void Run(const ApplyArgs& a) {
  const Rule rule(a.hyperparameters);
  if (a.modifiers == nullptr) {
    ApplyRule(rule, true, a);
  } else {
    ApplyRule(Modified<Rule>{rule, *a.modifiers}, a.modifiers->accumulate, a);
  }
}

void Apply(const ApplyArgs& a) {
  switch (a.optimizer) {
    case Optimizer::kNone:
      return;
    case Optimizer::kSgd:
      return Run<Sgd>(a);
    case Optimizer::kAdagrad:
      return Run<Adagrad>(a);
    case Optimizer::kAdagradPerId:
      return RunWithSquares<AdagradPerId>(a);
    case Optimizer::kAdagradMomentum:
      return Run<AdagradMomentum>(a);
    case Optimizer::kAdam:
      return Run<Adam>(a);
    case Optimizer::kAdamPerId:
      return RunWithSquares<Adam>(a);
    case Optimizer::kFtrl:
      return Run<Ftrl>(a);
    case Optimizer::kFtrlPerId:
      return RunWithSquares<Ftrl>(a);
    case Optimizer::kMomentum:
      return Run<Momentum>(a);
    case Optimizer::kRmsprop:
      return Run<Rmsprop>(a);
    case Optimizer::kRmspropPerId:
      return RunWithSquares<Rmsprop>(a);
    case Optimizer::kRowwiseAdagrad:
      return RunFullRows<RowwiseAdagrad>(a);
    case Optimizer::kLamb:
      return RunFullRows<Lamb>(a);
  }
}

}  // namespace

extern const RowKernels kRowKernels;
const RowKernels kRowKernels = {&Lookup, &Apply, &Expand, &Round};

}  // namespace LM_ISA
}  // namespace layoutmap
