#include "cc/core/ids/packed_ids.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"

namespace layoutmap {
namespace {

using std::to_string;

Status WrongMark(const std::vector<FeatureSpec>& specs, int64_t sample) {
  std::string names;
  for (const FeatureSpec& spec : specs) {
    names += (names.empty() ? "'" : ", '") + spec.feature + "'";
  }
  return InvalidArgument(
      "A packed batch must have been packed from a structure with the paths of "
      "this embedding's feature_config, whose features are " +
      names +
      ". Received: a batch that was packed from other features or modified "
      "afterwards (sample " +
      to_string(sample) + ")");
}

Status WrongSizes(int64_t sample, int64_t num_columns) {
  return InvalidArgument("A packed batch, sample " + to_string(sample) +
                         ": the numbers of ids of its features must be at "
                         "least 0, and all ids must fit in its " +
                         to_string(num_columns) +
                         " columns. Received: other numbers of ids");
}

Status StringsForRows(const FeatureSpec& spec, int64_t sample) {
  return InvalidArgument(
      "Feature '" + spec.feature +
      "' of a packed batch must have integer ids, because its table does not "
      "have an open vocabulary. Received: strings (sample " +
      to_string(sample) +
      "). With `vocabularies={table: tlm.vocabulary.OpenVocabulary(capacity)}` "
      "a table accepts strings");
}

Status CheckShape(const std::vector<FeatureSpec>& specs,
                  const PackedInput& input) {
  const MatrixView<const int64_t>& ids = input.ids;
  const auto num_features = static_cast<int64_t>(specs.size());
  if (ids.num_rows > INT32_MAX || ids.dim < 1 + num_features) {
    return InvalidArgument(
        "A packed batch of " + to_string(num_features) +
        " features must have at most 2^31 - 1 samples and at least " +
        to_string(1 + num_features) +
        " columns. Received: " + to_string(ids.num_rows) + " samples, " +
        to_string(ids.dim) + " columns");
  }
  if (input.weights.data != nullptr &&
      (input.weights.num_rows != ids.num_rows ||
       input.weights.dim != ids.dim)) {
    return InvalidArgument(
        "Packed weights must have the shape of the packed batch, " +
        to_string(ids.num_rows) + " x " + to_string(ids.dim) +
        ". Received: " + to_string(input.weights.num_rows) + " x " +
        to_string(input.weights.dim));
  }
  return Status();
}

// Number of samples that a thread reads at a time. The thread reads all
// features of these samples while the rows of the matrix are in the cache.
// Reading one feature at a time would load one cache line per id.
constexpr int64_t kSamplesPerChunk = 256;

// Returns the distance between the starts of two consecutive arrays, in int64
// values. Each array has `size` values, and all arrays are written at the same
// time. The distance is an odd number of cache lines. If the distance were a
// power of two, the arrays would evict each other's lines from the first-level
// cache.
int64_t PaddedSize(int64_t size) {
  constexpr int64_t kLine = 64 / sizeof(int64_t);
  return kLine * ((size / kLine + 1) | 1);
}

// Returns whether the ids can be converted to rows while they are read. This
// function does not check whether the ids are in the range of their table.
bool MayBeRows(const std::vector<FeatureSpec>& specs,
               const PackedInput& input) {
  if (input.weights.data != nullptr) return false;
  for (const FeatureSpec& spec : specs) {
    if (spec.max_sequence_length > 0 || spec.num_rows < 0 ||
        spec.num_rows > int64_t{1} << 32) {
      return false;
    }
  }
  return true;
}

// Adds the number of ids of each feature in samples [begin, end) to `totals`.
Status CountIds(const std::vector<FeatureSpec>& specs, const PackedInput& input,
                int64_t begin, int64_t end, int64_t* totals) {
  const auto num_features = static_cast<int64_t>(specs.size());
  for (int64_t s = begin; s < end; ++s) {
    const int64_t* row = input.ids.row(s);
    if (row[0] != input.mark) return WrongMark(specs, s);
    int64_t room = input.ids.dim - 1 - num_features;
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t size = row[1 + f];
      // The comparison uses unsigned numbers, so that it also rejects negative
      // sizes.
      if (static_cast<uint64_t>(size) > static_cast<uint64_t>(room)) {
        // If the ids were strings, the batch has the bitwise complement of the
        // number of ids.
        if (size < 0 && ~size <= room) return StringsForRows(specs[f], s);
        return WrongSizes(s, input.ids.dim);
      }
      room -= size;
      totals[f] += size;
    }
  }
  return Status();
}

}  // namespace

// Intermediate results, with one value per chunk of samples and feature.
struct UnpackedIds::Chunks {
  Chunks(int64_t num_samples, int64_t num_features)
      : count((num_samples + kSamplesPerChunk - 1) / kSamplesPerChunk),
        num_features(num_features),
        statuses(count),
        next(count * num_features),
        outside(count),
        all_one(count * num_features, 1) {}

  int64_t count, num_features;
  std::vector<Status> statuses;
  // At first, each value is the number of ids. Later, it is the index of the
  // next id to write.
  std::vector<int64_t> next;
  // Whether an id is outside its table.
  std::vector<uint8_t> outside;
  std::vector<uint8_t> all_one;
};

Status UnpackedIds::Make(const std::vector<FeatureSpec>& specs,
                         const PackedInput& input,
                         const ParallelFor& parallel_for,
                         UnpackedIds* unpacked) {
  LM_RETURN_IF_ERROR(CheckShape(specs, input));
  const int64_t num_samples = input.ids.num_rows;
  const auto num_features = static_cast<int64_t>(specs.size());
  Chunks chunks(num_samples, num_features);
  const auto for_chunks = [&](const auto& work) {
    // Counting the ids takes one to two nanoseconds per column.
    parallel_for(chunks.count, 2 * kSamplesPerChunk * (1 + num_features),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t c = begin; c < end; ++c) {
                     const int64_t first = c * kSamplesPerChunk;
                     work(c, first,
                          std::min(first + kSamplesPerChunk, num_samples));
                   }
                 });
  };
  for_chunks([&](int64_t c, int64_t first, int64_t last) {
    chunks.statuses[c] = CountIds(specs, input, first, last,
                                  chunks.next.data() + c * num_features);
  });
  // Returns the error of the first invalid sample, so that the result does not
  // depend on the order of the threads.
  for (const Status& status : chunks.statuses) LM_RETURN_IF_ERROR(status);

  UnpackedIds made;
  made.num_samples_ = num_samples;
  int64_t start = 0;
  bool may_be_rows = MayBeRows(specs, input);
  for (int64_t f = 0; f < num_features; ++f) {
    made.starts_.push_back(start);
    for (int64_t c = 0; c < chunks.count; ++c) {
      start += std::exchange(chunks.next[c * num_features + f], start);
    }
    may_be_rows &= start - made.starts_[f] <= INT32_MAX;
    start = made.starts_[f] + PaddedSize(start - made.starts_[f]);
  }
  // The array is not initialized, because the code below writes all values. An
  // initialization would take as long as writing the values.
  made.splits_.reset(new int64_t[num_features * PaddedSize(num_samples + 1)]);
  for (int64_t f = 0; f < num_features; ++f) {
    made.splits_[f * PaddedSize(num_samples + 1)] = 0;
  }
  if (may_be_rows) {
    made.rows_.reset(new uint32_t[start]);
    // The loop modifies a copy, because the code below uses `chunks.next` again
    // if the conversion to rows fails.
    std::vector<int64_t> next = chunks.next;
    std::vector<uint64_t> limits;
    for (const FeatureSpec& spec : specs) limits.push_back(spec.num_rows);
    for_chunks([&](int64_t c, int64_t first, int64_t last) {
      bool outside = false;
      made.WriteIds(input, first, last, next.data() + c * num_features,
                    [rows = made.rows_.get(), limits = limits.data(), &outside](
                        int64_t f, int64_t place, int64_t id) {
                      outside |= static_cast<uint64_t>(id) >= limits[f];
                      rows[place] = static_cast<uint32_t>(id);
                    });
      chunks.outside[c] = outside;
    });
    if (std::count(chunks.outside.begin(), chunks.outside.end(), 0) ==
        chunks.count) {
      *unpacked = std::move(made);
      return Status();
    }
    made.rows_.reset();
  }
  made.ids_.reset(new int64_t[start]);
  if (input.weights.data != nullptr) made.weights_.reset(new float[start]);
  for_chunks([&](int64_t c, int64_t first, int64_t last) {
    made.WriteIds(input, first, last, chunks.next.data() + c * num_features,
                  [ids = made.ids_.get()](int64_t, int64_t place, int64_t id) {
                    ids[place] = id;
                  });
  });
  if (made.weights_ != nullptr) {
    for_chunks([&](int64_t c, int64_t first, int64_t last) {
      made.WriteWeights(input, first, last,
                        chunks.all_one.data() + c * num_features);
    });
  }
  made.all_one_.assign(num_features, true);
  for (int64_t i = 0; i < chunks.count * num_features; ++i) {
    if (!chunks.all_one[i]) made.all_one_[i % num_features] = false;
  }
  *unpacked = std::move(made);
  return Status();
}

template <typename Put>
void UnpackedIds::WriteIds(const PackedInput& input, int64_t first,
                           int64_t last, int64_t* next, const Put& put) {
  const auto num_features = static_cast<int64_t>(starts_.size());
  // The local variables stay in registers. The compiler would reload the
  // members after every write.
  const int64_t* const starts = starts_.data();
  const int64_t stride = PaddedSize(num_samples_ + 1);
  for (int64_t s = first; s < last; ++s) {
    const int64_t* const sizes = input.ids.row(s) + 1;
    const int64_t* from = sizes + num_features;
    int64_t* split = splits_.get() + s + 1;
    for (int64_t f = 0; f < num_features; ++f, split += stride) {
      const int64_t size = sizes[f];
      const int64_t to = next[f];
      for (int64_t i = 0; i < size; ++i) put(f, to + i, from[i]);
      from += size;
      next[f] += size;
      *split = next[f] - starts[f];
    }
  }
}

void UnpackedIds::WriteWeights(const PackedInput& input, int64_t first,
                               int64_t last, uint8_t* all_one) {
  const auto num_features = static_cast<int64_t>(starts_.size());
  const int64_t stride = PaddedSize(num_samples_ + 1);
  for (int64_t s = first; s < last; ++s) {
    const float* from = input.weights.row(s) + 1 + num_features;
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t* const split = splits_.get() + f * stride + s;
      float* to = weights_.get() + starts_[f] + split[0];
      for (int64_t i = split[0]; i < split[1]; ++i, ++from, ++to) {
        *to = *from;
        all_one[f] &= *from == 1.0f;
      }
    }
  }
}

bool UnpackedIds::TakeRows(const std::vector<FeatureSpec>& specs,
                           const ParallelFor& parallel_for,
                           std::vector<RaggedIds>* features) const {
  if (rows_ == nullptr) return false;
  const auto num_features = static_cast<int64_t>(specs.size());
  features->resize(num_features);
  // The features share one owner, which keeps the arrays of all features alive.
  const auto owner = std::make_shared<
      std::pair<std::shared_ptr<uint32_t[]>, std::shared_ptr<int64_t[]>>>(
      rows_, splits_);
  const auto take = [&](int64_t f) {
    const Span<const int64_t> splits(
        splits_.get() + f * PaddedSize(num_samples_ + 1), num_samples_ + 1);
    (*features)[f] = RaggedIds::OfRows(
        specs[f], {rows_.get() + starts_[f], splits[num_samples_]}, splits,
        owner);
  };
  // Only the computation of gains takes noticeable time, about 4 ns per id.
  int64_t num_factors = 1;
  for (int64_t f = 0; f < num_features; ++f) {
    if (specs[f].combiner == Combiner::kSum) continue;
    num_factors += splits_[f * PaddedSize(num_samples_ + 1) + num_samples_];
  }
  parallel_for(num_features, 1 + 4 * num_factors / num_features,
               [&](int64_t begin, int64_t end) {
                 for (int64_t f = begin; f < end; ++f) take(f);
               });
  return true;
}

std::vector<FeatureInput<int64_t>> UnpackedIds::features() const {
  std::vector<FeatureInput<int64_t>> features(all_one_.size());
  for (size_t f = 0; f < features.size(); ++f) {
    const int64_t* splits = splits_.get() + f * PaddedSize(num_samples_ + 1);
    const int64_t num_ids = splits[num_samples_];
    features[f].ids = {ids_.get() + starts_[f], num_ids};
    features[f].splits = {splits, num_samples_ + 1};
    features[f].num_samples = num_samples_;
    // If all weights of a feature are 1, the feature is treated like a feature
    // without weights.
    if (weights_ != nullptr && !all_one_[f]) {
      features[f].weights = {weights_.get() + starts_[f], num_ids};
    }
  }
  return features;
}

bool ViewPackedIds(const std::vector<FeatureSpec>& specs,
                   const PackedInput& input,
                   const std::shared_ptr<const void>& owner,
                   const ParallelFor& parallel_for,
                   std::vector<RaggedIds>* features) {
  const auto num_features = static_cast<int64_t>(specs.size());
  const int64_t num_samples = input.ids.num_rows, num_columns = input.ids.dim;
  const int64_t num_sizes = 1 + num_features;
  if (num_samples == 0 || !MayBeRows(specs, input) ||
      !CheckShape(specs, input).ok()) {
    return false;
  }
  // The header is the mark and the numbers of ids. All samples must have the
  // header of the first sample.
  const int64_t* const header = input.ids.row(0);
  std::vector<int64_t> totals(num_features);
  if (!CountIds(specs, input, 0, 1, totals.data()).ok()) return false;
  // The last row of the table of each id in a sample.
  std::vector<uint64_t> last_rows;
  for (int64_t f = 0; f < num_features; ++f) {
    last_rows.insert(last_rows.end(), totals[f], specs[f].num_rows - 1);
    if (totals[f] > INT32_MAX / num_samples) return false;
  }
  const auto num_ids = static_cast<int64_t>(last_rows.size());
  std::vector<uint8_t> differs((num_samples + kSamplesPerChunk - 1) /
                               kSamplesPerChunk);
  // The sign bits detect ids outside of their tables, see `AnyOutside`.
  const auto check = [&](int64_t chunk) {
    const int64_t first = chunk * kSamplesPerChunk;
    const int64_t end = std::min(first + kSamplesPerChunk, num_samples);
    const uint64_t* const last = last_rows.data();
    uint64_t difference = 0, signs = 0;
    for (int64_t s = first; s < end; ++s) {
      const int64_t* const sizes = input.ids.row(s);
      const int64_t* const ids = sizes + num_sizes;
      for (int64_t i = 0; i < num_sizes; ++i) {
        difference |= static_cast<uint64_t>(sizes[i] ^ header[i]);
      }
      for (int64_t i = 0; i < num_ids; ++i) {
        const auto id = static_cast<uint64_t>(ids[i]);
        signs |= id | (last[i] - id);
      }
    }
    differs[chunk] = difference != 0 || signs >> 63 != 0;
  };
  parallel_for(static_cast<int64_t>(differs.size()),
               kSamplesPerChunk * num_columns, [&](int64_t begin, int64_t end) {
                 for (int64_t chunk = begin; chunk < end; ++chunk) check(chunk);
               });
  if (std::count(differs.begin(), differs.end(), 1) > 0) return false;
  features->clear();
  EvenIds even = {num_sizes, num_columns, 0};
  for (int64_t f = 0; f < num_features; ++f) {
    even.size = totals[f];
    features->push_back(RaggedIds::EvenView(
        specs[f], {input.ids.data, num_samples * num_columns}, even,
        num_samples, owner));
    even.first += even.size;
  }
  return true;
}

Status IdPacker::Make(const std::vector<std::string>& names,
                      const std::vector<FeatureInput<int64_t>>& features,
                      IdPacker* packer) {
  IdPacker made;
  made.features_ = features;
  made.splits_.resize(features.size());
  made.num_samples_ = features.empty() ? 0 : features[0].num_samples;
  for (size_t f = 0; f < features.size(); ++f) {
    if (features[f].num_samples != made.num_samples_) {
      return InvalidArgument(
          "The features of a packed batch must have the same number of "
          "samples. Received: feature '" +
          names[0] + "' with " + to_string(made.num_samples_) + ", feature '" +
          names[f] + "' with " + to_string(features[f].num_samples));
    }
    FeatureSpec spec;
    spec.feature = names[f];
    LM_RETURN_IF_ERROR(MakeSplits(spec, features[f], &made.splits_[f]));
    if (!features[f].weights.empty() &&
        features[f].weights.size() != features[f].ids.size()) {
      return InvalidArgument(
          "Feature '" + names[f] + "': weights must be one per id. Received: " +
          to_string(features[f].weights.size()) + " weights, " +
          to_string(features[f].ids.size()) + " ids");
    }
  }
  int64_t most_ids = 0;
  for (int64_t s = 0; s < made.num_samples_; ++s) {
    int64_t num_ids = 0;
    for (const std::vector<int64_t>& splits : made.splits_) {
      num_ids += splits[s + 1] - splits[s];
    }
    most_ids = std::max(most_ids, num_ids);
  }
  made.num_columns_ = 1 + static_cast<int64_t>(features.size()) + most_ids;
  *packer = std::move(made);
  return Status();
}

void IdPacker::Write(int64_t mark, MatrixView<int64_t> ids,
                     MatrixView<float> weights) const {
  const auto num_features = static_cast<int64_t>(features_.size());
  if (weights.data != nullptr) {
    std::fill_n(weights.data, weights.num_rows * weights.dim, 1.0f);
  }
  for (int64_t s = 0; s < num_samples_; ++s) {
    int64_t* row = ids.row(s);
    row[0] = mark;
    int64_t used = 1 + num_features;
    for (int64_t f = 0; f < num_features; ++f) {
      const FeatureInput<int64_t>& feature = features_[f];
      const int64_t first = splits_[f][s], size = splits_[f][s + 1] - first;
      row[1 + f] = size;
      std::copy_n(feature.ids.data() + first, size, row + used);
      if (weights.data != nullptr && !feature.weights.empty()) {
        std::copy_n(feature.weights.data() + first, size,
                    weights.row(s) + used);
      }
      used += size;
    }
    std::fill(row + used, row + ids.dim, int64_t{0});
  }
}

}  // namespace layoutmap
