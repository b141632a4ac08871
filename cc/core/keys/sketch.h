// Stores approximate use counts of keys without a row. Each key requires 16
// bits.

#ifndef TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_
#define TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_

#include <algorithm>
#include <cstdint>

#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"

namespace layoutmap {

// A count-min sketch of one segment. It has two rows of 8-bit cells. Each key
// has one cell in each row. A window consists of half as many ids as a row has
// cells. After each window, all cells are decremented by one. The counts have
// the following bounds:
//
//   * If a key was seen n times (up to 255) while N ids were counted, its
//     count is at least n - ceil(N / window), which is n - 1 within one
//     window. A key that is seen more than once in each window reaches any
//     count.
//   * A count is too high only if other keys share both cells. Among keys
//     that are seen once, fewer than one in ten have a count of two.
//
// Many other sketches halve all cells instead. The count of a key with k ids
// per window would then never reach 2 * k.
class SegmentSketch {
 public:
  // Returns the number of cells in each of the two rows. There are two cells
  // per key, and at least 256 cells, so that the window of a small vocabulary
  // is longer than a few steps.
  static int64_t NumCells(const BucketLayout& layout) {
    return std::max<int64_t>(2 * kKeysPerBucket * layout.buckets_per_segment(),
                             256);
  }

  // `cells` is [2, NumCells]. `seen` is the number of ids in the current
  // window.
  SegmentSketch(Span<uint8_t> cells, int64_t* seen)
      : cells_(cells), num_cells_(cells.size() / 2), seen_(seen) {}

  // Adds `times` uses of a key and returns its new count, which is at most 255.
  int32_t Add(int64_t key, int64_t times) {
    const uint64_t bits =
        MixBits(MixBits(static_cast<uint64_t>(key)) + 0x9E3779B97F4A7C15u);
    uint8_t& a = cells_[ScaledTo(num_cells_, static_cast<uint32_t>(bits))];
    uint8_t& b =
        cells_[num_cells_ +
               ScaledTo(num_cells_, static_cast<uint32_t>(bits >> 32))];
    times = std::min<int64_t>(times, 255);
    const int64_t count = std::min<int64_t>(std::min(a, b) + times, 255);
    // A cell is changed only if its value is below the new count. A cell with a
    // higher value also counts other keys.
    a = std::max(a, static_cast<uint8_t>(count));
    b = std::max(b, static_cast<uint8_t>(count));
    *seen_ += times;
    // If a window had at least as many ids as a row has cells, the cells would
    // be incremented faster than they are decremented.
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
