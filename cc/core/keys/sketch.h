// How often keys without a row were seen, in 16 bits a key.

#ifndef TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_
#define TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_

#include <algorithm>
#include <cstdint>

#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"

namespace layoutmap {

// A count-min sketch of one segment: two rows of 8-bit cells, of which a key
// has one each. It is never counted too low since the last halving; too high
// only by keys that share both of its cells.
class SegmentSketch {
 public:
  // Cells in one of the two rows: two for each key, and enough that a small
  // vocabulary does not forget within a few steps.
  static int64_t NumCells(const BucketLayout& layout) {
    return std::max<int64_t>(2 * kKeysPerBucket * layout.buckets_per_segment(),
                             256);
  }

  // `cells` are [2, NumCells]. `seen` counts what was added since all cells
  // were halved.
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
    // Half a key for each cell: at one and more, most keys that were seen
    // once would share their cells with others.
    if (2 * *seen_ >= num_cells_) Halve();
    return static_cast<int32_t>(count);
  }

 private:
  void Halve() {
    for (uint8_t& cell : cells_) cell >>= 1;
    *seen_ = 0;
  }

  Span<uint8_t> cells_;
  int64_t num_cells_;
  int64_t* seen_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_SKETCH_H_
