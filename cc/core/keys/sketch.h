// How often keys without a row were seen, in 16 bits a key.

#ifndef TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_
#define TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_

#include <algorithm>
#include <cstdint>

#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"

namespace layoutmap {

// A count-min sketch of one segment: two rows of 8-bit cells, of which a key
// has one each. Each time it has counted as many ids as half the cells of a
// row, its window, all cells go down by one. So:
//
//   * A key that was seen n times (up to 255) while N ids were counted has a
//     count of at least n - ceil(N / window): n - 1 if those are no more than
//     a window. A key that is seen more than once in each window reaches any
//     count.
//   * A count is too high only where other keys share both cells. Of keys that
//     are seen once among others that are, fewer than one in ten are counted
//     twice.
//
// Halving all cells instead would keep a key with k ids in a window from ever
// reaching 2 * k.
class SegmentSketch {
 public:
  // Cells in one of the two rows: two for each key, and enough that the window
  // of a small vocabulary is longer than a few steps.
  static int64_t NumCells(const BucketLayout& layout) {
    return std::max<int64_t>(2 * kKeysPerBucket * layout.buckets_per_segment(),
                             256);
  }

  // `cells` are [2, NumCells]. `seen` counts the ids of the window so far.
  SegmentSketch(Span<uint8_t> cells, int64_t* seen)
      : cells_(cells), num_cells_(cells.size() / 2), seen_(seen) {}

  // Counts `times` more and returns how often the key was seen, at most 255.
  int32_t Add(int64_t key, int64_t times) {
    const uint64_t bits =
        MixBits(MixBits(static_cast<uint64_t>(key)) + 0x9E3779B97F4A7C15u);
    uint8_t& a = cells_[ScaledTo(num_cells_, static_cast<uint32_t>(bits))];
    uint8_t& b =
        cells_[num_cells_ +
               ScaledTo(num_cells_, static_cast<uint32_t>(bits >> 32))];
    times = std::min<int64_t>(times, 255);
    const int64_t count = std::min<int64_t>(std::min(a, b) + times, 255);
    // Only up to the new count: a cell that is higher counts other keys.
    a = std::max(a, static_cast<uint8_t>(count));
    b = std::max(b, static_cast<uint8_t>(count));
    *seen_ += times;
    // Half an id for each cell: at one and more, cells would fill faster than
    // they empty.
    const int64_t window = num_cells_ / 2;
    for (; *seen_ >= window; *seen_ -= window) LowerCells();
    return static_cast<int32_t>(count);
  }

 private:
  void LowerCells() {
    for (uint8_t& cell : cells_) cell -= cell > 0;
  }

  Span<uint8_t> cells_;
  int64_t num_cells_;
  int64_t* seen_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_
