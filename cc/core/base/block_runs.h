// Contiguous runs of a block of a dense row-major tensor.

#ifndef TF_LAYOUTMAP_CORE_BASE_BLOCK_RUNS_H_
#define TF_LAYOUTMAP_CORE_BASE_BLOCK_RUNS_H_

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace layoutmap {

// Splits a block of a tensor of shape `full` into runs of elements that are
// adjacent both in the block and in the tensor. The block has the shape `block`
// and contains
//
//   block[i0, i1, ...] = full[start[0] + i0 * row_step, start[1] + i1, ...].
//
// Indices outside of the tensor are padding. All runs have the same size in the
// block, and their padding is at the end.
class BlockRuns {
 public:
  struct Run {
    // Flat index of the first element in the full tensor.
    int64_t first;
    // Number of elements that are not padding.
    int64_t size;
  };

  // All arguments have the same length, the rank. Sizes and starts are at least
  // 0, `row_step` is at least 1, and the number of elements of `full` and of
  // `block` must fit into 63 bits.
  BlockRuns(std::vector<int64_t> full, std::vector<int64_t> block,
            std::vector<int64_t> start, int64_t row_step)
      : full_(std::move(full)),
        block_(std::move(block)),
        start_(std::move(start)),
        row_step_(row_step) {
    assert(full_.size() == block_.size() && full_.size() == start_.size());
    // A run spans the trailing dimensions that the block covers completely, and
    // the dimension before them.
    outer_rank_ = full_.size();
    inner_size_ = 1;
    while (outer_rank_ > 0) {
      const size_t dim = --outer_rank_;
      const int64_t size = block_[dim];
      if (dim == 0 && row_step_ != 1) {
        // Rows that are not adjacent are separate runs.
        ++outer_rank_;
        break;
      }
      run_size_ = size * inner_size_;
      valid_size_ = ValidSize(dim) * inner_size_;
      first_ = start_[dim] * inner_size_;
      inner_size_ *= full_[dim];
      if (start_[dim] != 0 || size != full_[dim]) break;
    }
    num_runs_ = 1;
    for (size_t dim = 0; dim < outer_rank_; ++dim) num_runs_ *= block_[dim];
  }

  int64_t num_runs() const { return num_runs_; }

  // Number of elements of each run, including padding.
  int64_t run_size() const { return run_size_; }

  // Returns the run with an index in [0, num_runs()).
  Run run(int64_t index) const {
    int64_t first = first_;
    int64_t stride = inner_size_;
    for (size_t dim = outer_rank_; dim-- > 0;) {
      const int64_t i = index % block_[dim];
      index /= block_[dim];
      if (i >= ValidSize(dim)) return {0, 0};
      first += (start_[dim] + i * (dim == 0 ? row_step_ : 1)) * stride;
      stride *= full_[dim];
    }
    return {first, valid_size_};
  }

 private:
  // Returns the number of indices of a dimension that are not padding.
  int64_t ValidSize(size_t dim) const {
    const int64_t rest = full_[dim] - start_[dim];
    const int64_t step = dim == 0 ? row_step_ : 1;
    return rest <= 0 ? 0 : std::min(block_[dim], (rest - 1) / step + 1);
  }

  std::vector<int64_t> full_;
  std::vector<int64_t> block_;
  std::vector<int64_t> start_;
  int64_t row_step_;
  // Number of leading dimensions that are not part of a run.
  size_t outer_rank_;
  // Stride of the last outer dimension in the full tensor, in elements.
  int64_t inner_size_;
  int64_t num_runs_;
  int64_t run_size_ = 1;
  int64_t valid_size_ = 1;
  // Flat index of the first element of the first run, without the outer
  // dimensions.
  int64_t first_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_BLOCK_RUNS_H_
