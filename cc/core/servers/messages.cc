#include "cc/core/servers/messages.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

using std::to_string;

namespace {

void PutLong(int64_t value, std::vector<uint32_t>* words) {
  const auto bits = static_cast<uint64_t>(value);
  words->push_back(static_cast<uint32_t>(bits));
  words->push_back(static_cast<uint32_t>(bits >> 32));
}

int64_t TakeLong(const uint32_t* words) {
  return static_cast<int64_t>(words[0] | static_cast<uint64_t>(words[1]) << 32);
}

}  // namespace

void WriteNumUpdates(int64_t num_updates, float* header) {
  static_assert(sizeof(num_updates) == kFetchedHeader * sizeof(float));
  std::memcpy(header, &num_updates, sizeof(num_updates));
}

int64_t ReadNumUpdates(const float* header) {
  int64_t num_updates;
  std::memcpy(&num_updates, header, sizeof(num_updates));
  return num_updates;
}

void WriteHeader(const ApplyHeader& header, std::vector<uint32_t>* words) {
  PutLong(header.token.epoch, words);
  PutLong(header.token.number, words);
  PutLong(header.token.attempt, words);
  PutLong(header.num_updates, words);
}

Status ReadHeader(Span<const uint32_t> words, ApplyHeader* header,
                  Span<const uint32_t>* rest) {
  if (words.size() < ApplyHeader::kNumWords) {
    return InvalidArgument(
        "`request` must begin with " + to_string(ApplyHeader::kNumWords) +
        " words about its closure. Received: " + to_string(words.size()) +
        " words");
  }
  header->token.epoch = TakeLong(words.data());
  header->token.number = TakeLong(words.data() + 2);
  header->token.attempt = TakeLong(words.data() + 4);
  header->num_updates = TakeLong(words.data() + 6);
  *rest = {words.data() + ApplyHeader::kNumWords,
           words.size() - ApplyHeader::kNumWords};
  return Status();
}

Status ReadRows(Span<const uint32_t> words, const std::vector<PieceSize>& sizes,
                std::vector<Span<const uint32_t>>* rows) {
  const auto num_pieces = static_cast<int64_t>(sizes.size());
  int64_t next = num_pieces;
  rows->clear();
  for (int64_t p = 0; p < num_pieces; ++p) {
    if (words.size() < num_pieces || words[p] > words.size() - next) {
      return InvalidArgument(
          "`request` must have a number of rows for each of the " +
          to_string(num_pieces) +
          " shards here, and then the rows. Received: " +
          to_string(words.size()) + " words, too few for shard " +
          to_string(p) + " (table '" + sizes[p].table + "')");
    }
    rows->emplace_back(words.data() + next, words[p]);
    for (const uint32_t row : rows->back()) {
      if (row < sizes[p].num_rows) continue;
      return InvalidArgument("`request` must have rows below " +
                             to_string(sizes[p].num_rows) + " for shard " +
                             to_string(p) + " (table '" + sizes[p].table +
                             "'). Received: " + to_string(row));
    }
    next += words[p];
  }
  if (next == words.size()) return Status();
  return InvalidArgument("`request` must have " + to_string(next) +
                         " words, as its numbers of rows say. Received: " +
                         to_string(words.size()));
}

}  // namespace layoutmap
