// Fuzzes messages with keys to a server. The target checks that the server
// rejects the bytes, or that the bytes contain keys of the server's shards.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/fuzz/input_reader.h"

namespace layoutmap {
namespace {

constexpr int64_t kDim = 2;
// Number of buckets in the vocabulary, and number of buckets on the server. The
// vocabulary has two segments, and the server has the second segment.
constexpr int64_t kBuckets = 8, kHere = 4;

void CheckSteps(InputReader* input) {
  std::vector<int64_t> state = input->State(FetchedSteps::kSize);
  FetchedSteps steps(state);
  for (int64_t i = 0; i < 8; ++i) {
    const ClosureToken token = {input->MostlyBelow(4), input->Below(60) - 1,
                                input->Below(3)};
    bool is_repeated = false;
    if (!steps.Check(token, &is_repeated).ok()) continue;
    steps.Begin(token);
    FUZZ_CHECK(steps.OldestAge() >= 0);
    const int64_t ticket =
        is_repeated ? steps.Renew(token, 5) : steps.Add(token, 5);
    int64_t num_updates = 0;
    FUZZ_CHECK(steps.Find(ticket, &num_updates).ok());
    if (input->Below(2) == 1) steps.Forget(ticket);
  }
}

// A server with one shard of rows and one shard of an empty vocabulary.
struct Server {
  Server() {
    FUZZ_CHECK(BucketLayout::Make(kBuckets, &piece.layout).ok());
    piece.table = "words";
    piece.first_bucket = kBuckets - kHere;
    piece.num_buckets = kHere;
    piece.has_unknown_row = true;
    FUZZ_CHECK(CheckKeyPiece(piece).ok());
    FUZZ_CHECK(PartOf(kBuckets, piece.first_bucket, kHere, &buckets).ok());
    FUZZ_CHECK(PartOf(kBuckets * kKeysPerBucket, piece.first_row(),
                      kHere * kKeysPerBucket, &rows)
                   .ok());
    step.state.keys = {&buckets, {nullptr, keys.data(), nullptr}, 8};
    step.state.last_step = {&buckets, {nullptr, last_step.data(), nullptr}, 8};
    step.state.count = {&buckets, {nullptr, count.data(), nullptr}, 8};
    step.state.first_segment = 1;
    step.state.num_segments = 1;
    step.stored = {&buckets, {nullptr, keys.data(), nullptr}, 8};
    step.first_rows.table = {&rows, {nullptr, table.data(), nullptr}, kDim};
  }

  KeyPiece piece;
  KeyPieceStep step;
  RowPartition buckets, rows;
  std::vector<int64_t> keys = std::vector<int64_t>(8 * kHere, kEmptyKey);
  std::vector<int32_t> last_step = std::vector<int32_t>(8 * kHere, 0);
  std::vector<int32_t> count = std::vector<int32_t>(8 * kHere, 0);
  std::vector<float> table = std::vector<float>(8 * kHere * kDim);
};

void CheckFetch(InputReader* input) {
  KeyFetchWriter writer;
  writer.training = input->Below(2) == 1;
  writer.pieces.resize(2);
  for (size_t p = 0; p < 2; ++p) {
    KeyFetchWriter::Asked& piece = writer.pieces[p];
    piece.count = static_cast<uint32_t>(input->MostlyBelow(4));
    for (uint32_t i = 0; i < piece.count % 4; ++i) {
      if (p == 1) piece.keys.push_back(input->MostlyBelow(40));
      piece.compact.push_back(static_cast<uint8_t>(input->MostlyBelow(3)));
    }
  }
  std::vector<uint8_t> bytes(writer.size());
  writer.Write(bytes.data());
  const int64_t change = input->Below(32);
  if (change == 31) bytes.push_back(0);
  if (change == 30) bytes.resize(input->Below(bytes.size() + 1));
  // The capacity must equal the size, so that AddressSanitizer detects an
  // access after the last byte.
  bytes.shrink_to_fit();

  KeyFetchMessage message;
  const std::vector<PieceSize> sizes = {{"ads", 5, kDim, 1},
                                        {"words", 8 * kHere + 1, kDim, 1}};
  if (!message.Read(bytes, sizes, {false, true}).ok()) return;
  for (const uint32_t row : message.rows[0]) FUZZ_CHECK(row < 5);
  Server server;
  server.step.keys = &message.keys[1];
  if (!CheckKeysOf(server.piece, message.keys[1].keys).ok()) return;
  std::vector<KeyPieceStep> steps = {server.step};
  if (message.training) {
    FUZZ_CHECK(AdmitToPieces({server.piece}, SerialFor, &steps).ok());
  } else {
    FindInPieces({server.piece}, SerialFor, &steps);
  }
  for (const uint32_t row : RowsToSend(server.piece, steps[0])) {
    FUZZ_CHECK(row <= 8 * kHere);
  }
}

}  // namespace
}  // namespace layoutmap

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  layoutmap::InputReader input(data, size);
  layoutmap::CheckSteps(&input);
  layoutmap::CheckFetch(&input);
  return 0;
}
