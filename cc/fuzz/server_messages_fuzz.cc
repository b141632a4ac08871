// Any words and floats that reach a server: refused, or rows that are there.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/fuzz/input_reader.h"

namespace layoutmap {
namespace {

constexpr int64_t kDim = 3;

void CheckClosures(InputReader* input) {
  std::vector<int64_t> state(AppliedClosures::kSize, 0);
  for (int64_t i = 0; i < 8; ++i) {
    state[input->Below(20)] = input->MostlyBelow(40);
  }
  AppliedClosures closures(state);
  for (int64_t i = 0; i < 8; ++i) {
    const ClosureToken token = {input->MostlyBelow(4), input->MostlyBelow(60),
                                input->Below(3)};
    bool is_repeated = false;
    if (!closures.Check(token, &is_repeated).ok() || is_repeated) continue;
    closures.Apply(token, input->Below(9));
    if (!token.has_number()) continue;
    // Refused where counts of nonsense have grown too large; never new.
    const Status again =
        closures.Check({token.epoch, token.number, 77}, &is_repeated);
    FUZZ_CHECK(!again.ok() || is_repeated);
  }
}

void CheckApply(InputReader* input) {
  const auto num_words = input->Below(24);
  const std::vector<uint32_t> words =
      input->MostlyBelow<uint32_t>(num_words, 4);
  const std::vector<float> values =
      input->MostlyBelow<float>(input->Below(24), 3);
  ApplyHeader header;
  Span<const uint32_t> rest;
  if (!ReadHeader(words, &header, &rest).ok()) return;
  std::vector<Piece> pieces(2);
  std::vector<PieceSize> sizes(2);
  // Exactly of their sizes, so that AddressSanitizer sees one float beyond.
  std::vector<std::vector<float>> tables(2);
  std::vector<RowPartition> partitions(2);
  for (size_t p = 0; p < 2; ++p) {
    sizes[p].num_rows = input->Below(5);
    pieces[p].dim = kDim;
    pieces[p].optimizer = Optimizer::kSgd;
    pieces[p].num_hyperparameters = 1;
    tables[p].resize(sizes[p].num_rows * kDim);
    const std::vector<int64_t> offsets = {0, sizes[p].num_rows};
    FUZZ_CHECK(RowPartition::Make(Placement::kDiv, Span<const int64_t>(offsets),
                                  &partitions[p])
                   .ok());
  }
  std::vector<Span<const uint32_t>> rows;
  if (!ReadRows(rest, sizes, &rows).ok()) return;
  std::vector<PieceUpdate> updates(2);
  for (size_t p = 0; p < 2; ++p) {
    updates[p].rows = rows[p];
    updates[p].table.partition = &partitions[p];
    updates[p].table.dim = kDim;
    updates[p].table.shards = {tables[p].data()};
  }
  if (!ReadValues(pieces, values, &updates).ok()) return;
  ApplyUpdates(pieces, updates, 0, RowKernelsFor(CpuLevel::kBaseline),
               SerialFor);
}

}  // namespace
}  // namespace layoutmap

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  layoutmap::InputReader input(data, size);
  layoutmap::CheckClosures(&input);
  layoutmap::CheckApply(&input);
  return 0;
}
