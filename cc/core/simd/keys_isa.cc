// Implementation of the key kernels. This file is compiled once per instruction
// set. It must not include standard library headers, for the reason that
// rows_isa.cc explains.

#include "cc/core/simd/key_kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace layoutmap {
namespace LM_ISA {
namespace {

constexpr int64_t kLanes = 8;
// This value must equal `BucketLayout::kMaxProbes`.
constexpr int64_t kMaxProbes = 4;
constexpr int64_t kEmpty = INT64_MIN;

// This function must return the same result as `MixBits` in
// cc/core/keys/bucket_layout.h.
inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

#if defined(__AVX512F__)
// Returns the bits of a mask register. The functions use assembly, because GCC
// 12 can store a mask in a slot of one or two bytes on the stack, and read four
// bytes from this slot. The other bytes then contain arbitrary bits.
inline unsigned BitsOf8(__mmask8 mask) {
  unsigned bits;
  asm("kmovb %1, %0" : "=r"(bits) : "k"(mask));
  return bits;
}

inline unsigned BitsOf16(__mmask16 mask) {
  unsigned bits;
  asm("kmovw %1, %0" : "=r"(bits) : "k"(mask));
  return bits;
}
#endif

// Returns a bit mask of the lanes that contain the key.
inline unsigned LanesWith(const int64_t* keys, int64_t key) {
#if defined(__AVX512F__)
  return BitsOf8(_mm512_cmpeq_epi64_mask(_mm512_loadu_si512(keys),
                                         _mm512_set1_epi64(key)));
#elif defined(__AVX2__)
  const __m256i target = _mm256_set1_epi64x(key);
  const auto half = [&](const int64_t* four) {
    const __m256i found = _mm256_cmpeq_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(four)), target);
    return static_cast<unsigned>(
        _mm256_movemask_pd(_mm256_castsi256_pd(found)));
  };
  return half(keys) | half(keys + 4) << 4;
#else
  unsigned found = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    found |= static_cast<unsigned>(keys[lane] == key) << lane;
  }
  return found;
#endif
}

// Number of keys that are hashed together. The buckets of a block are
// prefetched while the preceding block is searched.
constexpr int64_t kBlock = 128;

// Computes the upper 32 bits of the hash of up to `kBlock` keys. Returns true
// if a key equals the value of empty lanes. The compiler can vectorize both
// loops, because each loop has values of one size.
inline bool HashBlock(const int64_t* keys, int64_t size, uint64_t* bits) {
  for (int64_t i = 0; i < size; ++i) {
    bits[i] = Mix(static_cast<uint64_t>(keys[i])) >> 32;
  }
  uint64_t num_empty = 0;
  for (int64_t i = 0; i < size; ++i) num_empty += keys[i] == kEmpty;
  return num_empty != 0;
}

bool BucketsOf(const BucketArgs& args) {
  const auto num_buckets = static_cast<uint64_t>(args.num_buckets);
  const auto num_segments = static_cast<uint64_t>(args.num_segments);
  const int64_t* const keys = args.keys;
  uint32_t* const buckets = args.buckets;
  uint8_t* const segments = args.segments;
  const int64_t size = args.size;
  bool has_empty = false;
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t end = size - first < kBlock ? size - first : kBlock;
    uint64_t bits[kBlock];
    has_empty |= HashBlock(keys + first, end, bits);
    for (int64_t i = 0; i < end; ++i) {
      buckets[first + i] = static_cast<uint32_t>((bits[i] * num_buckets) >> 32);
    }
    // This is the segment of the bucket, because `num_segments` divides
    // `num_buckets`.
    for (int64_t i = 0; i < end; ++i) {
      segments[first + i] =
          static_cast<uint8_t>((bits[i] * num_segments) >> 32);
    }
  }
  return has_empty;
}

// Returns the next bucket of a search after `bucket`. Both buckets are relative
// to the first bucket of the range.
inline int64_t Next(const BucketRange& range, int64_t bucket) {
  return bucket + 1 < range.size ? bucket + 1 : 0;
}

// Returns whether a search visits `kMaxProbes` buckets without wrapping around.
inline bool IsContiguous(const BucketRange& range, int64_t bucket) {
  return range.num_probes == kMaxProbes && bucket + kMaxProbes <= range.size;
}

// Visits bucket `p` of the search for each key in `missed`. Removes the keys
// that are found, and returns the number of the other keys.
int64_t VisitNext(const BucketRange& range, const KeyPlace* places, int64_t p,
                  int64_t num_missed, uint32_t* rows, MissedKey* missed) {
  int64_t num_kept = 0;
  for (int64_t j = 0; j < num_missed; ++j) {
    const uint32_t i = missed[j].index;
    int64_t bucket = places[i].bucket - range.first + p;
    bucket -= bucket >= range.size ? range.size : 0;
    const int64_t* const lanes = range.keys + bucket * kLanes;
    const unsigned found = LanesWith(lanes, places[i].key);
    const unsigned empty = LanesWith(lanes, kEmpty);
    rows[i] = static_cast<uint32_t>(bucket * kLanes) +
              __builtin_ctz(found | 1u << kLanes);
    missed[num_kept] = {i, missed[j].may_have_space | (empty != 0)};
    num_kept += found == 0;
  }
  return num_kept;
}

// Visits the other buckets of the search for each key in `missed`, which starts
// with kMaxProbes buckets. Removes the keys that are found, and returns the
// number of the other keys. Adds the number of visited buckets to `num_probes`.
// A key without a row needs all buckets, so the loop compares all of them.
int64_t VisitAllOthers(const BucketRange& range, const KeyPlace* places,
                       int64_t num_missed, uint32_t* rows, MissedKey* missed,
                       int64_t* num_probes) {
  constexpr int64_t kOthers = kMaxProbes - 1;
  const int64_t size = range.size;
  int64_t num_kept = 0, num_visited = 0;
  for (int64_t j = 0; j < num_missed; ++j) {
    const uint32_t i = missed[j].index;
    const int64_t key = places[i].key;
    const int64_t first = places[i].bucket - range.first + 1;
    unsigned found = 0, empty = 0;
    for (int64_t p = 0; p < kOthers; ++p) {
      int64_t bucket = first + p;
      bucket -= bucket >= size ? size : 0;
      const int64_t* const lanes = range.keys + bucket * kLanes;
      found |= LanesWith(lanes, key) << (p * kLanes);
      empty |= LanesWith(lanes, kEmpty);
    }
    const unsigned lane = __builtin_ctz(found | 1u << (kOthers * kLanes));
    num_visited += lane / kLanes + (found != 0);
    int64_t bucket = first + lane / kLanes;
    bucket -= bucket >= size ? size : 0;
    rows[i] = static_cast<uint32_t>(bucket * kLanes + lane % kLanes);
    missed[num_kept] = {i, missed[j].may_have_space | (empty != 0)};
    num_kept += found == 0;
  }
  *num_probes += num_visited;
  return num_kept;
}

// The search visits the first bucket of all keys, and then the other buckets of
// the keys that are left. The loops therefore have no branches that depend on
// the keys, because such branches would often be mispredicted.
int64_t Find(const BucketRange& range, const KeyPlace* places, int64_t size,
             uint32_t* rows, MissedKey* missed, int64_t* num_probes) {
  int64_t num_missed = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t row = (places[i].bucket - range.first) * kLanes;
    const unsigned found = LanesWith(range.keys + row, places[i].key);
    const unsigned empty = LanesWith(range.keys + row, kEmpty);
    rows[i] = static_cast<uint32_t>(row) + __builtin_ctz(found | 1u << kLanes);
    missed[num_missed] = {static_cast<uint32_t>(i), empty != 0};
    num_missed += found == 0;
  }
  *num_probes += size;
  if (range.num_probes == kMaxProbes) {
    num_missed =
        VisitAllOthers(range, places, num_missed, rows, missed, num_probes);
  } else {
    for (int64_t p = 1; p < range.num_probes && num_missed > 0; ++p) {
      *num_probes += num_missed;
      num_missed = VisitNext(range, places, p, num_missed, rows, missed);
    }
  }
  for (int64_t j = 0; j < num_missed; ++j) {
    rows[missed[j].index] = kNoRelativeRow;
  }
  return num_missed;
}

// The segments and the buckets of the keys of a block. The buckets are relative
// to the first bucket of the segment.
struct KeyBlock {
  const int64_t* keys;
  int64_t size;
  uint32_t buckets[kBlock];
  uint32_t segments[kBlock];
};

// Computes the block of the keys that start with `first`. Returns true if a
// key equals the value of empty lanes.
bool MakeBlock(const SearchArgs& args, int64_t first, KeyBlock* block) {
  const auto num_segments = static_cast<uint64_t>(args.num_segments);
  const auto num_buckets = static_cast<uint64_t>(args.buckets_per_segment);
  const int64_t size = args.size - first < kBlock ? args.size - first : kBlock;
  uint64_t bits[kBlock];
  block->keys = args.keys + first;
  block->size = size;
  const bool has_empty = HashBlock(block->keys, size, bits);
  // The upper 32 bits of the product of the hash and the number of segments are
  // the segment. The lower 32 bits select the bucket in the segment. This is
  // the same bucket as in `BucketsOf`, because `num_segments` divides the
  // number of all buckets.
  for (int64_t i = 0; i < size; ++i) bits[i] *= num_segments;
  for (int64_t i = 0; i < size; ++i) {
    block->segments[i] = static_cast<uint32_t>(bits[i] >> 32);
  }
  for (int64_t i = 0; i < size; ++i) {
    block->buckets[i] =
        static_cast<uint32_t>(((bits[i] & 0xFFFFFFFFu) * num_buckets) >> 32);
  }
  return has_empty;
}

// Prefetches the first `num_probes` buckets of each search, without wrapping
// around. The code prefetches into the second-level cache, because prefetches
// into the first-level cache would stall.
void PrefetchBlock(const SearchArgs& args, const KeyBlock& block,
                   int64_t num_probes) {
  for (int64_t i = 0; i < block.size; ++i) {
    const int64_t* const lanes =
        args.lanes[block.segments[i]] + block.buckets[i] * kLanes;
    for (int64_t p = 0; p < num_probes; ++p) {
      __builtin_prefetch(lanes + p * kLanes, /*write=*/0, /*locality=*/2);
    }
  }
}

// Visits the first bucket of all keys in the block. Writes the indices of the
// keys that it does not find to `missed`, and returns their number.
int64_t VisitFirst(const SearchArgs& args, const KeyBlock& block,
                   uint32_t* rows, uint32_t* missed) {
  const int64_t* const* const lanes = args.lanes;
  uint32_t* const counts = args.counts;
  const int64_t size = block.size;
  int64_t num_missed = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t segment = block.segments[i];
    const int64_t row = block.buckets[i] * kLanes;
    const unsigned found = LanesWith(lanes[segment] + row, block.keys[i]);
    rows[i] = static_cast<uint32_t>(row) + __builtin_ctz(found | 1u << kLanes);
    missed[num_missed] = static_cast<uint32_t>(i);
    num_missed += found == 0;
    ++counts[segment];
  }
  return num_missed;
}

// Visits the other buckets of the keys in `missed`. Returns the number of keys
// that it does not find, and adds the number of visited buckets to
// `num_probes`.
int64_t VisitOthers(const SearchArgs& args, const KeyBlock& block,
                    int64_t num_missed, uint32_t* rows, uint32_t* missed,
                    int64_t* num_probes) {
  const auto size = static_cast<uint32_t>(args.buckets_per_segment);
  uint32_t has_space[kBlock];
  for (int64_t j = 0; j < num_missed; ++j) {
    const uint32_t i = missed[j];
    const int64_t* const lanes = args.lanes[block.segments[i]];
    has_space[i] = LanesWith(lanes + block.buckets[i] * kLanes, kEmpty) != 0;
  }
  for (uint32_t p = 1; p < args.num_probes && num_missed > 0; ++p) {
    *num_probes += num_missed;
    int64_t num_kept = 0;
    for (int64_t j = 0; j < num_missed; ++j) {
      const uint32_t i = missed[j];
      uint32_t bucket = block.buckets[i] + p;
      bucket -= bucket >= size ? size : 0;
      const int64_t row = bucket * kLanes;
      const int64_t* const lanes = args.lanes[block.segments[i]] + row;
      const unsigned found = LanesWith(lanes, block.keys[i]);
      has_space[i] |= LanesWith(lanes, kEmpty) != 0;
      rows[i] =
          static_cast<uint32_t>(row) + __builtin_ctz(found | 1u << kLanes);
      missed[num_kept] = i;
      num_kept += found == 0;
    }
    num_missed = num_kept;
  }
  for (int64_t j = 0; j < num_missed; ++j) {
    const uint32_t i = missed[j];
    rows[i] = has_space[i] != 0 ? kNoRowButSpace : kNoRelativeRow;
  }
  return num_missed;
}

SearchResult Search(const SearchArgs& args) {
  SearchResult result;
  KeyBlock blocks[2];
  uint32_t missed[kBlock];
  if (args.size == 0) return result;
  result.has_empty_key = MakeBlock(args, 0, &blocks[0]);
  PrefetchBlock(args, blocks[0], 1);
  int64_t num_missed = 0;
  for (int64_t first = 0; first < args.size; first += kBlock) {
    const KeyBlock& block = blocks[first / kBlock % 2];
    if (first + kBlock < args.size) {
      KeyBlock* const next = &blocks[(first / kBlock + 1) % 2];
      result.has_empty_key |= MakeBlock(args, first + kBlock, next);
      // If many keys of this block are new, many keys of the next block are
      // probably new, too. The search for a new key visits all buckets.
      const bool has_many_new = 4 * num_missed > kBlock;
      PrefetchBlock(args, *next, has_many_new ? args.num_probes : 1);
    }
    uint32_t* const rows = args.rows + first;
    num_missed = VisitFirst(args, block, rows, missed);
    result.num_probes += block.size;
    if (num_missed > 0) {
      num_missed = VisitOthers(args, block, num_missed, rows, missed,
                               &result.num_probes);
    }
    uint8_t* const segments = args.segments + first;
    const int64_t size = block.size;
    for (int64_t i = 0; i < size; ++i) {
      segments[i] = static_cast<uint8_t>(block.segments[i]);
    }
  }
  return result;
}

int64_t Group(const GroupArgs& args) {
  uint64_t* const uses = args.uses;
  const uint64_t* const used = args.used;
  const int64_t size = args.size;
  uint32_t* const ranks = args.ranks;
  uint32_t* const next = args.next;
  uint32_t num_rows = 0;
  for (int64_t w = 0; w < args.num_words; ++w) {
    ranks[w] = num_rows;
    const auto first = static_cast<uint32_t>(args.first_row + w * 64);
    for (uint64_t bits = used[w]; bits != 0; bits &= bits - 1) {
      args.rows[num_rows] =
          first + static_cast<uint32_t>(__builtin_ctzll(bits));
      next[num_rows++] = 0;
    }
  }
  // The number of a row is the number of used rows before it.
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t row = uses[i] >> 32;
    const uint64_t before = used[row >> 6] & ((uint64_t{1} << (row & 63)) - 1);
    const uint32_t number =
        ranks[row >> 6] + static_cast<uint32_t>(__builtin_popcountll(before));
    uses[i] = uint64_t{number} << 32 | static_cast<uint32_t>(uses[i]);
    ++next[number];
  }
  uint32_t start = 0;
  for (uint32_t u = 0; u < num_rows; ++u) {
    args.starts[u] = start;
    const uint32_t times = next[u];
    next[u] = start;
    start += times;
  }
  for (int64_t i = 0; i < size; ++i) {
    args.positions[next[uses[i] >> 32]++] = static_cast<uint32_t>(uses[i]);
  }
  return num_rows;
}

int64_t FindFree(const BucketRange& range, int64_t first) {
  int64_t bucket = first - range.first;
  if (IsContiguous(range, bucket)) {
    // The loop compares all buckets. A loop that ends at the first bucket with
    // an empty lane would have a branch that is hard to predict.
    const int64_t* keys = range.keys + bucket * kLanes;
    unsigned found = 0;
    for (int64_t p = 0; p < kMaxProbes; ++p) {
      found |= LanesWith(keys + p * kLanes, kEmpty) << (p * kLanes);
    }
    return found == 0 ? -1 : first * kLanes + __builtin_ctz(found);
  }
  for (int64_t p = 0; p < range.num_probes; ++p) {
    const unsigned found = LanesWith(range.keys + bucket * kLanes, kEmpty);
    if (found != 0) {
      return (range.first + bucket) * kLanes + __builtin_ctz(found);
    }
    bucket = Next(range, bucket);
  }
  return -1;
}

// Returns the lowest step in four buckets. In `lanes`, sets the bit of each
// lane that has this step.
inline int32_t LowestStep(const int32_t* steps, unsigned* lanes) {
  int32_t lowest = steps[0];
  for (int64_t i = 1; i < kMaxProbes * kLanes; ++i) {
    lowest = steps[i] < lowest ? steps[i] : lowest;
  }
  unsigned found = 0;
#if defined(__AVX512F__)
  const __m512i all = _mm512_set1_epi32(lowest);
  for (int i = 0; i < kMaxProbes * kLanes; i += 16) {
    const unsigned equal =
        BitsOf16(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(steps + i), all));
    found |= equal << i;
  }
#else
  for (int i = 0; i < kMaxProbes * kLanes; ++i) {
    found |= static_cast<unsigned>(steps[i] == lowest) << i;
  }
#endif
  *lanes = found;
  return lowest;
}

int64_t FindLeastRecent(const BucketRange& range, int64_t first, int32_t step) {
  int64_t bucket = first - range.first;
  if (IsContiguous(range, bucket)) {
    unsigned lanes;
    const int32_t lowest =
        LowestStep(range.last_step + bucket * kLanes, &lanes);
    return lowest < step ? first * kLanes + __builtin_ctz(lanes) : -1;
  }
  int64_t found = -1;
  int32_t oldest = step;
  for (int64_t p = 0; p < range.num_probes; ++p) {
    const int32_t* last_step = range.last_step + bucket * kLanes;
    int32_t lowest = last_step[0];
    for (int lane = 1; lane < kLanes; ++lane) {
      lowest = last_step[lane] < lowest ? last_step[lane] : lowest;
    }
    const bool comes_before =
        found != -1 && (range.first + bucket) * kLanes < found;
    if (lowest < oldest || (lowest == oldest && comes_before)) {
      unsigned lanes = 0;
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes |= static_cast<unsigned>(last_step[lane] == lowest) << lane;
      }
      found = (range.first + bucket) * kLanes + __builtin_ctz(lanes);
      oldest = lowest;
    }
    bucket = Next(range, bucket);
  }
  return found;
}

// Draws the same uniformly distributed values as `FillFirstValues`
// (cc/core/keys/first_values.h). The compiler can vectorize the loop, which
// computes several splitmix64 values at once.
void Draw(const DrawArgs& args) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const double a = args.a, width = args.b - args.a;
  const uint64_t state = args.state;
  const int64_t size = args.size;
  float* values = args.values;
  for (int64_t c = 0; c < size; ++c) {
    const uint64_t bits = Mix(state + static_cast<uint64_t>(c + 1) * kGolden);
    // The random number has 24 bits, so it fits in an int32. Every instruction
    // set has an instruction that converts an int32 to double.
    const auto drawn = static_cast<double>(static_cast<int32_t>(bits >> 40));
    values[c] = static_cast<float>(a + width * (drawn / (1 << 24)));
  }
}

}  // namespace

extern const KeyKernels kKeyKernels;
const KeyKernels kKeyKernels = {BucketsOf,       Find, Search, Group, FindFree,
                                FindLeastRecent, Draw};

}  // namespace LM_ISA
}  // namespace layoutmap
