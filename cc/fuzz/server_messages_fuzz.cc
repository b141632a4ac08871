// Fuzzes messages to a server. The target checks that the server rejects the
// bytes, or that the bytes request existing rows.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/servers/wire.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/fuzz/input_reader.h"

namespace layoutmap {
namespace {

constexpr int64_t kDim = 3;
constexpr size_t kPieces = 2;

void CheckClosures(InputReader* input) {
  std::vector<int64_t> state = input->State(AppliedClosures::kSize);
  AppliedClosures closures(state);
  for (int64_t i = 0; i < 8; ++i) {
    const ClosureToken token = {input->MostlyBelow(4), input->MostlyBelow(60),
                                input->Below(3)};
    bool is_repeated = false;
    if (!closures.Check(token, &is_repeated).ok() || is_repeated) continue;
    closures.Apply(token, input->Below(9));
    if (!token.has_number()) continue;
    // `Check` may return an error if the counts in the state are invalid, but
    // must never report the closure as new.
    const Status again =
        closures.Check({token.epoch, token.number, 77}, &is_repeated);
    FUZZ_CHECK(!again.ok() || is_repeated);
  }
}

template <typename T>
void Append(T value, std::vector<uint8_t>* bytes) {
  const size_t at = bytes->size();
  bytes->resize(at + sizeof(value));
  std::memcpy(bytes->data() + at, &value, sizeof(value));
}

// Returns a message. In most cases, the message is valid. In other cases, it is
// truncated or extended.
std::vector<uint8_t> Message(InputReader* input, bool is_apply) {
  std::vector<uint8_t> bytes;
  if (is_apply) {
    for (int i = 0; i < 4; ++i) Append(input->MostlyBelow(9), &bytes);
  }
  const bool is_narrow = input->Below(2) == 1;
  Append(input->Below(40) == 39 ? 7u : is_narrow ? 1u : 0u, &bytes);
  int64_t num_rows = 0;
  for (size_t p = 0; p < kPieces; ++p) {
    const auto count = static_cast<uint32_t>(input->MostlyBelow(4));
    num_rows += count % 4;
    Append(count, &bytes);
  }
  for (size_t p = 0; is_apply && p < kPieces; ++p) {
    Append(static_cast<float>(input->MostlyBelow(3)), &bytes);
  }
  for (int64_t v = 0; is_apply && v < num_rows * kDim; ++v) {
    if (is_narrow) {
      Append(input->Take<uint16_t>(), &bytes);
    } else {
      Append(static_cast<float>(input->Below(5)), &bytes);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    bytes.push_back(static_cast<uint8_t>(input->MostlyBelow(3)));
  }
  const int64_t change = input->Below(32);
  if (change == 31) bytes.push_back(0);
  if (change == 30) bytes.resize(input->Below(bytes.size() + 1));
  // The capacity must equal the size, so that AddressSanitizer detects an
  // access after the last byte.
  bytes.shrink_to_fit();
  return bytes;
}

// A server and its shards.
struct Server {
  explicit Server(InputReader* input) {
    for (size_t p = 0; p < kPieces; ++p) {
      sizes[p] = {"ads", input->Below(5), kDim, 1};
      pieces[p].dim = kDim;
      pieces[p].optimizer = Optimizer::kSgd;
      pieces[p].num_hyperparameters = 1;
      tables[p].resize(sizes[p].num_rows * kDim);
      const std::vector<int64_t> offsets = {0, sizes[p].num_rows};
      FUZZ_CHECK(RowPartition::Make(Placement::kDiv,
                                    Span<const int64_t>(offsets),
                                    &partitions[p])
                     .ok());
    }
  }

  std::vector<PieceSize> sizes{kPieces};
  std::vector<Piece> pieces{kPieces};
  std::vector<std::vector<float>> tables{kPieces};
  std::vector<RowPartition> partitions{kPieces};
};

void CheckFetch(InputReader* input) {
  Server server(input);
  const std::vector<uint8_t> bytes = Message(input, /*is_apply=*/false);
  FetchMessage message;
  if (!message.Read(bytes, server.sizes).ok()) return;
  std::vector<PieceRead> reads(kPieces);
  for (size_t p = 0; p < kPieces; ++p) {
    reads[p].rows = message.rows[p];
    reads[p].table.partition = &server.partitions[p];
    reads[p].table.dim = kDim;
    reads[p].table.shards = {server.tables[p].data()};
  }
  const RowKernels& kernels = RowKernelsFor(CpuLevel::kBaseline);
  if (message.wire == RowType::kFloat32) {
    std::vector<float> out(NumValues(reads));
    FetchRows(reads, kernels, SerialFor, out.data());
  } else {
    std::vector<uint16_t> out(NumValues(reads));
    FetchRows(reads, kernels, SerialFor, out.data());
  }
}

void CheckApply(InputReader* input) {
  Server server(input);
  const std::vector<uint8_t> bytes = Message(input, /*is_apply=*/true);
  ApplyMessage message;
  if (!message.Read(bytes, server.sizes).ok()) return;
  std::vector<float> widened(message.half_gradients.size());
  FromBfloat16(message.half_gradients, SerialFor, widened.data());
  std::vector<PieceUpdate> updates;
  if (!ReadUpdates(
           server.pieces, message,
           message.wire == RowType::kFloat32 ? message.gradients : widened,
           &updates)
           .ok()) {
    return;
  }
  for (size_t p = 0; p < kPieces; ++p) {
    updates[p].table.partition = &server.partitions[p];
    updates[p].table.dim = kDim;
    updates[p].table.shards = {server.tables[p].data()};
  }
  ApplyUpdates(server.pieces, updates, 0, RowKernelsFor(CpuLevel::kBaseline),
               SerialFor);
}

// Returns whether a message lies within `bytes` at an aligned offset.
bool IsInside(Span<const uint8_t> message, const std::vector<uint8_t>& bytes) {
  const int64_t first = message.data() - bytes.data();
  return first >= 0 && message.size() >= 0 && first % 8 == 0 &&
         first + message.size() <= static_cast<int64_t>(bytes.size());
}

// Checks messages that contain other messages.
void CheckParts(InputReader* input) {
  const int64_t num_messages = 1 + input->Below(3);
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < num_messages; ++i) {
    Append(static_cast<int64_t>(input->MostlyBelow(20)), &bytes);
  }
  bytes.resize(bytes.size() + input->Below(64));
  JoinedMessage joined;
  if (joined.Read(bytes).ok()) {
    FUZZ_CHECK(IsInside(joined.apply, bytes));
    FUZZ_CHECK(IsInside(joined.fetch, bytes));
  }
  std::vector<Span<const uint8_t>> messages;
  if (!ReadBundle(bytes, num_messages, &messages).ok()) return;
  FUZZ_CHECK(static_cast<int64_t>(messages.size()) == num_messages);
  for (const Span<const uint8_t>& message : messages) {
    FUZZ_CHECK(IsInside(message, bytes));
  }
  FUZZ_CHECK(BundleBytes(messages) == static_cast<int64_t>(bytes.size()));
}

}  // namespace
}  // namespace layoutmap

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  layoutmap::InputReader input(data, size);
  layoutmap::CheckClosures(&input);
  layoutmap::CheckFetch(&input);
  layoutmap::CheckApply(&input);
  layoutmap::CheckParts(&input);
  return 0;
}
