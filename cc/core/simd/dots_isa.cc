// Implementation of the dot product kernels. This file is compiled once per
// instruction set. It must not include standard library headers, for the reason
// that rows_isa.cc explains.
//
// Both kernels multiply small matrices. The lanes of a register are different
// elements of the result, and each element is summed in one lane, in the order
// of the inner dimension. For dot products, the rows of a sample are therefore
// transposed first. Without the transpose, the lanes of each product would have
// to be added up, which takes more instructions than the products.

#include "cc/core/simd/dot_kernels.h"
#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {
namespace {

// Number of rows of the result that are computed together.
constexpr int kBlock = 4;
// Number of floats in a cache line.
constexpr int64_t kLine = 16;

inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Computes kBlock rows and kRegisters registers of columns of the product of
// the matrices `a` [kBlock, depth] and `b` [depth, columns].
template <int kRegisters>
inline void MultiplyColumns(const float* a, int64_t a_stride, const float* b,
                            int64_t b_stride, int64_t depth, float* out,
                            int64_t out_stride) {
  Vector sums[kBlock][kRegisters];
  for (int i = 0; i < kBlock; ++i) {
    for (int r = 0; r < kRegisters; ++r) sums[i][r] = Vector{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector values[kRegisters];
    for (int r = 0; r < kRegisters; ++r) {
      values[r] = Load(b + k * b_stride + r * kLanes);
    }
    for (int i = 0; i < kBlock; ++i) {
      const float factor = a[i * a_stride + k];
      for (int r = 0; r < kRegisters; ++r) sums[i][r] += factor * values[r];
    }
  }
  for (int i = 0; i < kBlock; ++i) {
    for (int r = 0; r < kRegisters; ++r) {
      Store(out + i * out_stride + r * kLanes, sums[i][r]);
    }
  }
}

// Computes kBlock rows of the product for the columns [0, columns), and for
// further columns up to a multiple of the register width.
inline void Multiply(const float* a, int64_t a_stride, const float* b,
                     int64_t b_stride, int64_t depth, int64_t columns,
                     float* out, int64_t out_stride) {
  int64_t c = 0;
  for (; c + kLanes < columns; c += 2 * kLanes) {
    MultiplyColumns<2>(a, a_stride, b + c, b_stride, depth, out + c,
                       out_stride);
  }
  if (c < columns) {
    MultiplyColumns<1>(a, a_stride, b + c, b_stride, depth, out + c,
                       out_stride);
  }
}

// Copies `size` floats. The memory after both arrays can be read and written,
// up to `room` floats from the start.
inline void Copy(const float* from, int64_t size, int64_t room, float* to) {
  int64_t i = 0;
  for (; i < size && i + kLanes <= room; i += kLanes) {
    Store(to + i, Load(from + i));
  }
  for (; i < size; ++i) to[i] = from[i];
}

// Copies the rows of the samples [begin, end) to the workspace. The loop reads
// several consecutive samples of a feature, because a CPU detects the access
// patterns of only a few matrices, and the rows of a sample at equal offsets in
// all matrices can compete for the same lines of the cache.
inline void ReadRows(const DotLayout& layout, const float* const* features,
                     int64_t begin, int64_t end, const DotWorkspace& work) {
  const int64_t dim = layout.dim;
  for (int64_t i = 0; i < layout.num_features; ++i) {
    for (int64_t s = begin; s < end; ++s) {
      Copy(features[i] + s * dim, dim, dim,
           work.rows + (s - begin) * work.sample_stride + i * work.dim_stride);
    }
  }
}

// Prefetches the rows of the features [i, i + kBlock) of a sample into the
// second-level cache.
template <typename T>
inline void PrefetchRows(const DotLayout& layout, T* const* matrices, int64_t i,
                         int64_t sample) {
  const int64_t end = Smaller(i + kBlock, layout.num_features);
  for (; i < end; ++i) {
    const float* const row = matrices[i] + sample * layout.dim;
    for (int64_t c = 0; c < layout.dim; c += kLine) {
      __builtin_prefetch(row + c, 0, 2);
    }
  }
}

// Copies results from the workspace to the outputs of the samples [begin, end).
inline void WriteResults(const DotLayout& layout, const DotWorkspace& work,
                         int64_t begin, int64_t end, float* const* out) {
  const int64_t dim = layout.dim;
  for (int64_t i = 0; i < layout.num_features; ++i) {
    for (int64_t s = begin; s < end; ++s) {
      Copy(
          work.results + (s - begin) * work.sample_stride + i * work.dim_stride,
          dim, dim, out[i] + s * dim);
    }
  }
}

// Writes the transpose of a block of 4 rows and 4 columns.
inline void TransposeBlock(const float* in, int64_t in_stride, float* out,
                           int64_t out_stride) {
#if defined(__SSE2__)
  __m128 r0 = _mm_load_ps(in), r1 = _mm_load_ps(in + in_stride),
         r2 = _mm_load_ps(in + 2 * in_stride),
         r3 = _mm_load_ps(in + 3 * in_stride);
  _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
  _mm_store_ps(out, r0);
  _mm_store_ps(out + out_stride, r1);
  _mm_store_ps(out + 2 * out_stride, r2);
  _mm_store_ps(out + 3 * out_stride, r3);
#else
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) out[j * out_stride + i] = in[i * in_stride + j];
  }
#endif
}

// Writes the transpose of the rows of a sample to `columns`.
inline void TransposeRows(const DotLayout& layout, const float* rows,
                          const DotWorkspace& work) {
  for (int64_t i = 0; i < layout.num_features; i += 4) {
    for (int64_t c = 0; c < layout.dim; c += 4) {
      TransposeBlock(rows + i * work.dim_stride + c, work.dim_stride,
                     work.columns + c * work.feature_stride + i,
                     work.feature_stride);
    }
  }
}

// Writes the products of a sample from the matrix `square` to the output. Each
// row is copied with full registers. The floats after a row are overwritten by
// the next row.
inline void WriteProducts(const DotLayout& layout, const DotWorkspace& work,
                          float* out) {
  const int64_t n = layout.num_features;
  int64_t room = layout.num_outputs();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t size = layout.products_of(i);
    Copy(work.square + i * work.feature_stride, size, room, out);
    if (layout.full_matrix) {
      for (int64_t j = size; j < n; ++j) out[j] = 0.0f;
    }
    const int64_t step = layout.full_matrix ? n : size;
    out += step;
    room -= step;
  }
}

void Products(const DotLayout& layout, const float* const* features,
              int64_t begin, int64_t end, const DotWorkspace& work,
              float* out) {
  const int64_t n = layout.num_features;
  for (int64_t s = begin; s < end; ++s) {
    const int64_t in_block = (s - begin) % work.num_samples;
    if (in_block == 0) {
      ReadRows(layout, features, s, Smaller(s + work.num_samples, end), work);
    }
    const float* const rows = work.rows + in_block * work.sample_stride;
    TransposeRows(layout, rows, work);
    for (int64_t i = 0; i < n; i += kBlock) {
      // The last row of the block has the most products.
      Multiply(rows + i * work.dim_stride, work.dim_stride, work.columns,
               work.feature_stride, layout.dim, Smaller(i + kBlock, n),
               work.square + i * work.feature_stride, work.feature_stride);
    }
    WriteProducts(layout, work, out + s * layout.num_outputs());
  }
}

// Writes the symmetric matrix g[i, j] + g[j, i] to `square`. Copies the rows of
// the triangle with full registers, and then transposes blocks of the triangle.
inline void ReadGradients(const DotLayout& layout, const float* gradients,
                          const DotWorkspace& work) {
  const int64_t n = layout.num_features, stride = work.feature_stride;
  int64_t room = layout.num_outputs();
  for (int64_t i = 0; i < n; ++i) {
    float* const row = work.square + i * stride;
    Copy(gradients, layout.products_of(i), room, row);
    row[i] = layout.self_interaction ? 2.0f * row[i] : 0.0f;
    const int64_t step = layout.full_matrix ? n : layout.products_of(i);
    gradients += step;
    room -= step;
  }
  for (int64_t i = 0; i < n; i += 4) {
    for (int64_t j = 0; j < i; j += 4) {
      TransposeBlock(work.square + i * stride + j, stride,
                     work.square + j * stride + i, stride);
    }
    for (int64_t k = i + 1; k < Smaller(i + 4, n); ++k) {
      for (int64_t j = i; j < k; ++j) {
        work.square[j * stride + k] = work.square[k * stride + j];
      }
    }
  }
}

void Gradients(const DotLayout& layout, const float* const* features,
               const float* gradients, int64_t begin, int64_t end,
               const DotWorkspace& work, float* const* out) {
  const int64_t n = layout.num_features;
  // For rows of one cache line, the prefetch instructions take more time than
  // they save.
  const bool is_wide = layout.dim > kLine;
  while (begin < end) {
    const int64_t block_end = Smaller(begin + work.num_samples, end);
    ReadRows(layout, features, begin, block_end, work);
    for (int64_t s = begin; s < block_end; ++s) {
      const int64_t offset = (s - begin) * work.sample_stride;
      ReadGradients(layout, gradients + s * layout.num_outputs(), work);
      const int64_t next = Smaller(s + work.num_samples, end - 1);
      for (int64_t i = 0; i < n; i += kBlock) {
        if (is_wide) {
          PrefetchRows(layout, features, i, next);
          PrefetchRows(layout, out, i, s);
        }
        Multiply(work.square + i * work.feature_stride, work.feature_stride,
                 work.rows + offset, work.dim_stride, n, layout.dim,
                 work.results + offset + i * work.dim_stride, work.dim_stride);
      }
    }
    WriteResults(layout, work, begin, block_end, out);
    begin = block_end;
  }
}

}  // namespace

extern const DotKernels kDotKernels;
const DotKernels kDotKernels = {&Products, &Gradients};

}  // namespace LM_ISA
}  // namespace layoutmap
