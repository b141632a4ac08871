#include "cc/core/rows/unique_rows.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {
namespace {

// Maximum number of bits that one pass of the radix sort processes. The 2^11
// counters fill a quarter of a 32 KiB first-level cache, and the pages that a
// pass writes fit in a second-level TLB. Sorting rows of 21 bits (2 million
// rows) takes two passes.
constexpr int kMaxDigitBits = 11;

int BitWidth(uint64_t x) {
  int bits = 0;
  for (; x > 0; x >>= 1) ++bits;
  return bits;
}

// The upper bits of an item are the row, and the lower bits are the position or
// the label. Each pass of the sort is stable, so sorting by row keeps the order
// of positions.
using Item = uint64_t;

uint32_t RowOf(Item item) { return static_cast<uint32_t>(item >> 32); }

// Sorts items whose rows are in [first_row, first_row + width).
void SortItems(Span<Item> items, int64_t first_row, int64_t width) {
  const int bits = BitWidth(width - 1);
  const int num_passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  if (num_passes == 0 || items.size() < 2) return;
  const int digit_bits = (bits + num_passes - 1) / num_passes;
  const uint32_t mask = (uint32_t{1} << digit_bits) - 1;
  const auto base = static_cast<uint32_t>(first_row);

  std::vector<uint32_t> counts(static_cast<size_t>(num_passes) << digit_bits);
  for (const Item item : items) {
    const uint32_t row = RowOf(item) - base;
    for (int pass = 0; pass < num_passes; ++pass) {
      ++counts[(pass << digit_bits) + (row >> (pass * digit_bits) & mask)];
    }
  }
  const RawArray<Item> scratch(items.size());
  Item* from = items.data();
  Item* to = scratch.data();
  for (int pass = 0; pass < num_passes; ++pass) {
    uint32_t* const next = counts.data() + (pass << digit_bits);
    uint32_t start = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) {
      start += std::exchange(next[digit], start);
    }
    const int shift = pass * digit_bits;
    for (int64_t k = 0; k < items.size(); ++k) {
      to[next[(RowOf(from[k]) - base) >> shift & mask]++] = from[k];
    }
    std::swap(from, to);
  }
  if (from != items.data()) std::copy_n(from, items.size(), items.data());
}

// The items of a batch, split into parts by ranges of rows. The parts are
// sorted separately. A part fits in a second-level cache, and threads do not
// write to the same cache lines. All items of a row are in the same part and
// keep their order, so results do not depend on the number of threads.
class Parts {
 public:
  Parts(Span<const Span<const uint32_t>> segments, int64_t num_ids,
        int64_t num_rows, Span<const uint32_t> labels,
        const ParallelFor& parallel_for)
      : segments_(segments),
        labels_(labels),
        num_ids_(num_ids),
        parallel_for_(parallel_for),
        items_(num_ids) {
    segment_starts_ = {0};
    for (Span<const uint32_t> segment : segments) {
      segment_starts_.push_back(segment_starts_.back() + segment.size());
    }
    if (num_ids < kManyIds) {
      MakeInOnePart(num_rows);
    } else {
      Divide(num_rows);
    }
  }

  size_t count() const { return first_rows_.size() - 1; }
  // Returns the sorted items of a part.
  Span<Item> items(size_t part) const {
    return {items_.data() + starts_[part], starts_[part + 1] - starts_[part]};
  }
  int64_t start(size_t part) const { return starts_[part]; }

  // Calls `work(part)` for each part. The calls run in parallel if there are
  // many ids.
  template <typename Work>
  void ForEach(const Work& work) const {
    if (count() == 1) return work(0);
    const auto num_parts = static_cast<int64_t>(count());
    parallel_for_(num_parts, 4 * num_ids_ / num_parts,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t p = begin; p < end; ++p) work(p);
                  });
  }

  void Sort() {
    ForEach([&](size_t part) {
      SortItems(items(part), first_rows_[part],
                first_rows_[part + 1] - first_rows_[part]);
    });
  }

 private:
  static constexpr int64_t kNumChunks = 16;
  static constexpr int64_t kMaxParts = 32;

  // Calls `use(row, position)` for each id in [begin, end).
  template <typename Use>
  void ForIds(int64_t begin, int64_t end, const Use& use) const {
    for (int64_t s = 0; s < segments_.size(); ++s) {
      const int64_t start = segment_starts_[s];
      const int64_t last = std::min(end, segment_starts_[s + 1]);
      for (int64_t k = std::max(begin, start); k < last; ++k) {
        use(segments_[s][k - start], k);
      }
    }
  }
  Item MakeItem(uint32_t row, int64_t k) const {
    const auto label = labels_.empty() ? static_cast<uint32_t>(k) : labels_[k];
    return Item{row} << 32 | label;
  }

  void MakeInOnePart(int64_t num_rows) {
    first_rows_ = {0, std::max<int64_t>(num_rows, 1)};
    starts_ = {0, num_ids_};
    Item* const items = items_.data();
    ForIds(0, num_ids_,
           [&](uint32_t row, int64_t k) { items[k] = MakeItem(row, k); });
  }

  // Calls `work(chunk, begin, end)` for each chunk of ids.
  template <typename Work>
  void ForChunks(const Work& work) const {
    parallel_for_(kNumChunks, 2 * num_ids_ / kNumChunks,
                  [&](int64_t first, int64_t last) {
                    for (int64_t c = first; c < last; ++c) {
                      work(c, num_ids_ * c / kNumChunks,
                           num_ids_ * (c + 1) / kNumChunks);
                    }
                  });
  }

  void Divide(int64_t num_rows) {
    const int shift = std::max(0, BitWidth(num_rows - 1) - kMaxDigitBits);
    const int64_t num_buckets = ((num_rows - 1) >> shift) + 1;
    std::vector<uint32_t> counts(kNumChunks * num_buckets);
    ForChunks([&](int64_t chunk, int64_t begin, int64_t end) {
      uint32_t* const own = counts.data() + chunk * num_buckets;
      ForIds(begin, end, [&](uint32_t row, int64_t) { ++own[row >> shift]; });
    });

    // The loop assigns adjacent buckets to a part until the part has its share
    // of the ids.
    std::vector<uint8_t> part_of(num_buckets);
    // Number of ids, indexed by part and chunk.
    std::vector<int64_t> sizes;
    int64_t size_of_part = 0;
    for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
      if (sizes.empty() || size_of_part * kMaxParts >= num_ids_) {
        first_rows_.push_back(bucket << shift);
        sizes.resize(sizes.size() + kNumChunks);
        size_of_part = 0;
      }
      part_of[bucket] = static_cast<uint8_t>(first_rows_.size() - 1);
      for (int64_t chunk = 0; chunk < kNumChunks; ++chunk) {
        const uint32_t size = counts[chunk * num_buckets + bucket];
        sizes[sizes.size() - kNumChunks + chunk] += size;
        size_of_part += size;
      }
    }
    first_rows_.push_back(num_rows);
    int64_t start = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (i % kNumChunks == 0) starts_.push_back(start);
      start += std::exchange(sizes[i], start);
    }
    starts_.push_back(start);

    ForChunks([&](int64_t chunk, int64_t begin, int64_t end) {
      int64_t next[kMaxParts + 1];
      for (size_t p = 0; p < count(); ++p) {
        next[p] = sizes[p * kNumChunks + chunk];
      }
      Item* const items = items_.data();
      const uint8_t* const parts = part_of.data();
      ForIds(begin, end, [&](uint32_t row, int64_t k) {
        items[next[parts[row >> shift]]++] = MakeItem(row, k);
      });
    });
  }

  const Span<const Span<const uint32_t>> segments_;
  const Span<const uint32_t> labels_;
  const int64_t num_ids_;
  const ParallelFor& parallel_for_;
  std::vector<int64_t> segment_starts_;
  RawArray<Item> items_;
  // The first row and the first item of each part. The last element is the end
  // of the last part.
  std::vector<int64_t> first_rows_;
  std::vector<int64_t> starts_;
};

}  // namespace

UniqueRows FindUniqueRows(Span<const Span<const uint32_t>> segments,
                          int64_t num_rows, const ParallelFor& parallel_for,
                          Span<const uint32_t> labels) {
  int64_t num_ids = 0;
  for (Span<const uint32_t> segment : segments) num_ids += segment.size();
  assert(labels.empty() || labels.size() == num_ids);
  Parts parts(segments, num_ids, num_rows, labels, parallel_for);
  parts.Sort();

  // Each row is in one part, so the total number of unique rows is the sum over
  // the parts.
  std::vector<int64_t> first_unique(parts.count());
  parts.ForEach([&](size_t p) {
    const Span<Item> items = parts.items(p);
    int64_t count = !items.empty();
    for (int64_t k = 1; k < items.size(); ++k) {
      count += RowOf(items[k]) != RowOf(items[k - 1]);
    }
    first_unique[p] = count;
  });
  int64_t num_unique = 0;
  for (int64_t& first : first_unique) {
    num_unique += std::exchange(first, num_unique);
  }

  UniqueRows unique;
  unique.positions.resize(num_ids);
  unique.rows.resize(num_unique);
  unique.splits.resize(num_unique + 1);
  unique.splits[num_unique] = num_ids;
  parts.ForEach([&](size_t p) {
    const Span<Item> items = parts.items(p);
    uint32_t* const positions = unique.positions.data() + parts.start(p);
    int64_t u = first_unique[p];
    for (int64_t k = 0; k < items.size(); ++k) {
      positions[k] = static_cast<uint32_t>(items[k]);
      if (k > 0 && RowOf(items[k]) == RowOf(items[k - 1])) continue;
      unique.rows[u] = RowOf(items[k]);
      unique.splits[u++] = parts.start(p) + k;
    }
  });
  return unique;
}

}  // namespace layoutmap
