// Kernels that compute the dot products of the rows of a sample. They are
// compiled once per instruction set.

#ifndef TF_LAYOUTMAP_CORE_SIMD_DOT_KERNELS_H_
#define TF_LAYOUTMAP_CORE_SIMD_DOT_KERNELS_H_

#include <cstdint>

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// The selection and the order of the dot products of a sample. Product (i, j)
// is the dot product of the rows of features i and j.
struct DotLayout {
  int64_t num_features;
  int64_t dim;
  // If true, the output contains the products (i, i).
  bool self_interaction;
  // If false, the output contains the lower triangle of the matrix of products,
  // row by row. If true, it contains the full matrix, with zeros above the
  // triangle.
  bool full_matrix;

  // Number of products of row i of the triangle.
  int64_t products_of(int64_t i) const { return i + self_interaction; }
  int64_t num_outputs() const {
    return full_matrix
               ? num_features * num_features
               : num_features * (num_features - 1 + 2 * self_interaction) / 2;
  }
};

// Matrices in which the kernels process a block of samples. `dim_stride` and
// `feature_stride` are multiples of the widest register, and numbers of rows
// are multiples of 4, so that the loops have no remainders. The caller sets all
// memory to zeros once. The kernels change no padding, except for the columns
// of `square`, where the padding is never read. All matrices are aligned to 64
// bytes.
struct DotWorkspace {
  int64_t num_samples;  // of a block
  int64_t sample_stride;
  int64_t dim_stride;
  int64_t feature_stride;
  float* rows;     // [num_samples, num_features, dim_stride]
  float* results;  // The same shape as `rows`.
  float* columns;  // [dim, feature_stride]: the transposed rows of one sample
  float* square;   // [num_features, feature_stride]
};

struct DotKernels {
  // Writes the products of the samples [begin, end). features[i] is a matrix
  // [num_samples, dim]; `out` is a matrix [num_samples, num_outputs].
  void (*products)(const DotLayout& layout, const float* const* features,
                   int64_t begin, int64_t end, const DotWorkspace& work,
                   float* out);
  // Writes the gradients of the features for the samples [begin, end), given
  // the gradients of the products:
  //
  //   out[i][s, :] = sum over j of (g[i, j] + g[j, i]) * features[j][s, :]
  //
  // where g is the lower triangular matrix with the values of gradients[s, :].
  void (*gradients)(const DotLayout& layout, const float* const* features,
                    const float* gradients, int64_t begin, int64_t end,
                    const DotWorkspace& work, float* const* out);
};

// Returns the kernels for `level`, which this CPU must support. Each sum has
// the same order for all levels, so that results are bitwise identical.
const DotKernels& DotKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_DOT_KERNELS_H_
