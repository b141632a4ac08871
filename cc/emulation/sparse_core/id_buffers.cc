#include "cc/emulation/sparse_core/id_buffers.h"

#include <algorithm>

namespace layoutmap {
namespace {

int64_t RoundUp(int64_t value) {
  return (value + kSparseCoreAlignment - 1) / kSparseCoreAlignment *
         kSparseCoreAlignment;
}

// Returns the ends of the minibatches: 0, the splits, kMaxMinibatches. Bit 0 of
// `splits` is the middle of all buckets, bits 1 and 2 are the middles of both
// halves, and so on.
std::vector<int64_t> MinibatchEnds(int64_t splits) {
  std::vector<int64_t> ends = {0, kMaxMinibatches};
  int64_t first_bit = 0;
  for (int64_t size = kMaxMinibatches; size > 1; size /= 2) {
    const int64_t num_parts = kMaxMinibatches / size;
    for (int64_t part = 0; part < num_parts; ++part) {
      if ((splits >> (first_bit + part)) & 1) {
        ends.push_back(part * size + size / 2);
      }
    }
    first_bit += num_parts;
  }
  std::sort(ends.begin(), ends.end());
  return ends;
}

Status CheckCore(const CoreIds& core, int64_t index, int64_t num_shards) {
  const int64_t size = core.counts.size();
  if (size != num_shards + 1 && size != num_shards * kMaxMinibatches + 1) {
    return InvalidArgument(
        "The id counts should have either " + std::to_string(num_shards + 1) +
        " elements when there is no minibatching or " +
        std::to_string(num_shards * kMaxMinibatches + 1) +
        " elements when there are multiple minibatches for each sparsecore. "
        "But instead got " +
        std::to_string(size) + " elements.");
  }
  const int64_t num_ids = core.rows.size();
  if (core.counts[size - 1] > num_ids) {
    return InvalidArgument(
        "The last element of id counts " +
        std::to_string(core.counts[size - 1]) +
        " should not exceed the size of the corresponding sorted tensors " +
        std::to_string(num_ids) + " for sparsecore " + std::to_string(index));
  }
  bool is_valid = core.counts[0] >= 0 && core.cols.size() == num_ids &&
                  core.gains.size() == num_ids;
  for (int64_t i = 1; i < size; ++i) {
    is_valid = is_valid && core.counts[i - 1] <= core.counts[i];
  }
  if (is_valid) return {};
  return InvalidArgument(
      "The id counts must ascend, and the sorted tensors must have the same "
      "sizes (sparsecore " +
      std::to_string(index) + ").");
}

void Pad(int64_t begin, int64_t end, IdBuffers* buffers) {
  for (int64_t i = begin; i < end; ++i) {
    buffers->rows[i] = kSparseCorePadding;
    buffers->cols[i] = kSparseCorePadding;
    buffers->gains[i] = static_cast<float>(kSparseCorePadding);
  }
}

}  // namespace

Status SizeOfBuffers(const BufferSettings& settings, int64_t num_cores,
                     BufferSizes* sizes) {
  sizes->num_row_pointers =
      settings.max_minibatches * num_cores * RoundUp(settings.num_shards);
  const int64_t per_core =
      settings.max_ids_per_chip_per_sample * settings.samples_per_core;
  // The factors are below 2^31.
  if (per_core > kSparseCorePadding / num_cores ||
      sizes->num_row_pointers > kSparseCorePadding) {
    return InvalidArgument(
        "The buffers of a chip must have less than 2^31 "
        "elements. Received: max_ids_per_chip_per_sample " +
        std::to_string(settings.max_ids_per_chip_per_sample) + " for " +
        std::to_string(settings.samples_per_core) + " samples per sparsecore.");
  }
  sizes->num_ids = per_core * num_cores;
  if (sizes->num_ids % kSparseCoreAlignment == 0) return {};
  return InvalidArgument("The max_ids_per_chip is set to be " +
                         std::to_string(sizes->num_ids) +
                         " which is not divisible by the xla_pad_size " +
                         std::to_string(kSparseCoreAlignment) + " .");
}

Status FillBuffers(const BufferSettings& settings, int64_t splits,
                   const std::vector<CoreIds>& cores, IdBuffers* buffers) {
  int64_t num_ids = 0;
  for (size_t core = 0; core < cores.size(); ++core) {
    LM_RETURN_IF_ERROR(CheckCore(cores[core], static_cast<int64_t>(core),
                                 settings.num_shards));
    if (cores[core].counts.size() != cores[0].counts.size()) {
      return InvalidArgument(
          "The id counts of all sparsecores must have the same size.");
    }
    num_ids += cores[core].counts[cores[core].counts.size() - 1];
  }
  const bool has_buckets = cores[0].counts.size() != settings.num_shards + 1;
  const std::vector<int64_t> ends = MinibatchEnds(splits);
  const auto num_minibatches = static_cast<int64_t>(ends.size()) - 1;
  if (num_minibatches > settings.max_minibatches ||
      (num_minibatches > 1 && !has_buckets)) {
    return InvalidArgument(
        "The number of minibatches per sparse core is " +
        std::to_string(num_minibatches) +
        ". But the max minibatches per sparse core is set to be " +
        std::to_string(has_buckets ? settings.max_minibatches : 1) +
        " which is smaller.");
  }
  const int64_t capacity = buffers->rows.size();
  int64_t place = 0;
  int64_t pointer = 0;
  int64_t num_packed = 0;
  for (const CoreIds& core : cores) {
    for (int64_t minibatch = 0; minibatch < num_minibatches; ++minibatch) {
      for (int64_t shard = 0; shard < settings.num_shards; ++shard) {
        const int64_t first =
            has_buckets ? shard * kMaxMinibatches + ends[minibatch] : shard;
        const int64_t last = has_buckets
                                 ? shard * kMaxMinibatches + ends[minibatch + 1]
                                 : shard + 1;
        const int64_t begin = core.counts[first];
        int64_t count = core.counts[last] - begin;
        if (place + count > capacity) {
          if (!settings.allow_id_dropping) {
            return InvalidArgument(
                "The max_ids_per_chip is set to be " +
                std::to_string(capacity) +
                " which is not going to fit all ids. The remaining id count "
                "is " +
                std::to_string(num_ids - num_packed) +
                " . Please consider setting the allow_id_dropping to be "
                "true. ");
          }
          count = capacity - place;
        }
        std::copy_n(core.rows.data() + begin, count,
                    buffers->rows.data() + place);
        std::copy_n(core.cols.data() + begin, count,
                    buffers->cols.data() + place);
        std::copy_n(core.gains.data() + begin, count,
                    buffers->gains.data() + place);
        place += count;
        num_packed += count;
        buffers->row_pointers[pointer++] = static_cast<int32_t>(place);
        Pad(place, RoundUp(place), buffers);
        place = RoundUp(place);
      }
      for (const int64_t end = RoundUp(pointer); pointer < end; ++pointer) {
        buffers->row_pointers[pointer] = static_cast<int32_t>(place);
      }
    }
  }
  buffers->row_pointers_unpadded_size = static_cast<int32_t>(pointer);
  buffers->ids_unpadded_size = static_cast<int32_t>(place);
  buffers->num_minibatches = static_cast<int32_t>(num_minibatches);
  buffers->num_dropped_ids = num_ids - num_packed;
  // TensorFlow does not write the other elements.
  Pad(place, capacity, buffers);
  std::fill(buffers->row_pointers.begin() + pointer,
            buffers->row_pointers.end(), static_cast<int32_t>(place));
  return {};
}

}  // namespace layoutmap
