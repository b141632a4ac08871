// Fuzzes ids, splits and weights. The target checks that they are rejected with
// a message, or that they form a valid batch whose unique rows match the ids.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/fuzz/input_reader.h"

namespace layoutmap {
namespace {

FeatureSpec TakeSpec(InputReader* input) {
  FeatureSpec spec;
  spec.feature = "ads";
  spec.table = "ad_table";
  spec.num_rows = 1 + input->Below(70);
  spec.combiner = static_cast<Combiner>(input->Below(3));
  spec.max_sequence_length = input->Below(4) == 0 ? 1 + input->Below(4) : 0;
  return spec;
}

std::vector<int64_t> TakeSplits(InputReader* input, Form form, int64_t num_ids,
                                int64_t num_samples) {
  std::vector<int64_t> splits;
  if (input->Below(8) == 0) {
    return input->MostlyBelow<int64_t>(input->Below(12), num_ids + 1);
  }
  if (form == Form::kRagged) {
    splits.push_back(0);
    for (int64_t s = 1; s < num_samples; ++s) {
      const int64_t left = num_ids - splits.back();
      splits.push_back(splits.back() + input->Below(left + 1));
    }
    splits.push_back(num_ids);
  } else if (form == Form::kSparse) {
    int64_t sample = 0;
    int64_t position = 0;
    for (int64_t i = 0; i < num_ids; ++i) {
      if (input->Below(3) == 0) {
        ++sample;
        position = 0;
      }
      position +=
          input->Below(9) == 0 ? input->Take<int8_t>() : 1 + input->Below(2);
      splits.push_back(sample);
      splits.push_back(position);
    }
  }
  return splits;
}

template <typename Tid>
void CheckIds(InputReader* input) {
  const FeatureSpec spec = TakeSpec(input);
  const int64_t num_ids = input->Below(30);
  FeatureInput<Tid> batch;
  batch.form = static_cast<Form>(input->Below(3));
  batch.num_samples = input->MostlyBelow(12);
  // Larger valid batches would only use more memory.
  if (batch.num_samples > 12 && batch.num_samples <= INT32_MAX) {
    batch.num_samples %= 12;
  }
  const int64_t num_samples =
      batch.num_samples < 0 || batch.num_samples > 12 ? 3 : batch.num_samples;
  const std::vector<Tid> ids = input->MostlyBelow<Tid>(num_ids, spec.num_rows);
  const std::vector<int64_t> splits =
      TakeSplits(input, batch.form, num_ids, num_samples);
  std::vector<float> weights;
  if (input->Below(2) == 0) {
    weights.resize(input->Below(8) == 0 ? input->Below(9) : num_ids);
    for (float& weight : weights) {
      weight = input->Below(9) == 0 ? input->Take<float>() : input->Below(5);
    }
  }
  batch.ids = ids;
  batch.splits = splits;
  batch.weights = weights;

  RaggedIds checked, view;
  const Status status = RaggedIds::Make(spec, batch, &checked);
  const auto owner = std::make_shared<int>();
  if (RaggedIds::MakeView(spec, batch, owner, &view)) {
    FUZZ_CHECK(status.ok());
    FUZZ_CHECK(view.num_outputs() == checked.num_outputs());
    view.lookup_rows().With([&](auto ids) {
      FUZZ_CHECK(ids.size() == checked.rows().size());
      for (int64_t i = 0; i < ids.size(); ++i) {
        FUZZ_CHECK(static_cast<uint32_t>(ids[i]) == checked.rows()[i]);
      }
    });
    for (int64_t o = 0; o <= view.num_outputs(); ++o) {
      FUZZ_CHECK(view.splits()[o] == checked.splits()[o]);
    }
  }
  if (!status.ok()) {
    FUZZ_CHECK(status.message().find("ads") != std::string::npos);
    FUZZ_CHECK(checked.rows().empty() && checked.num_samples() == 0);
    return;
  }
  FUZZ_CHECK(checked.num_samples() == batch.num_samples);
  const Span<const uint32_t> rows = checked.rows();
  const Span<const int64_t> found = checked.splits();
  FUZZ_CHECK(found[0] == 0 && found[found.size() - 1] == rows.size());
  for (int64_t o = 0; o < checked.num_outputs(); ++o) {
    FUZZ_CHECK(found[o] <= found[o + 1]);
  }
  for (const uint32_t row : rows) FUZZ_CHECK(row < spec.num_rows);
  FUZZ_CHECK(checked.gains().empty() || checked.gains().size() == rows.size());
  for (const float gain : checked.gains()) FUZZ_CHECK(!std::isnan(gain));

  const std::vector<Span<const uint32_t>> segments = {rows};
  const UniqueRows unique =
      FindUniqueRows(Span<const Span<const uint32_t>>(segments), spec.num_rows);
  FUZZ_CHECK(static_cast<int64_t>(unique.positions.size()) == rows.size());
  for (int64_t u = 0; u < unique.size(); ++u) {
    FUZZ_CHECK(u == 0 || unique.rows[u - 1] < unique.rows[u]);
    FUZZ_CHECK(unique.splits[u] < unique.splits[u + 1]);
    for (int64_t p = unique.splits[u]; p < unique.splits[u + 1]; ++p) {
      FUZZ_CHECK(rows[unique.positions[p]] == unique.rows[u]);
      FUZZ_CHECK(p == unique.splits[u] ||
                 unique.positions[p - 1] < unique.positions[p]);
    }
  }
}

}  // namespace
}  // namespace layoutmap

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  layoutmap::InputReader input(data, size);
  if (input.Below(2) == 0) {
    layoutmap::CheckIds<int32_t>(&input);
  } else {
    layoutmap::CheckIds<int64_t>(&input);
  }
  return 0;
}
