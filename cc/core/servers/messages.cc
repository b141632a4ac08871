#include "cc/core/servers/messages.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/wire.h"

namespace layoutmap {

using std::to_string;

namespace {

constexpr int64_t kWord = sizeof(uint32_t);

template <typename T>
T ReadValue(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

template <typename T>
uint8_t* Put(T value, uint8_t* bytes) {
  std::memcpy(bytes, &value, sizeof(value));
  return bytes + sizeof(value);
}

Span<const uint8_t> Skip(Span<const uint8_t> bytes, int64_t count) {
  return {bytes.data() + count, bytes.size() - count};
}

// Reads the value type and the counts at the start of `*bytes`, and removes
// them from `*bytes`.
Status ReadCounts(const std::vector<PieceSize>& sizes,
                  Span<const uint8_t>* bytes, RowType* wire,
                  std::vector<uint32_t>* counts) {
  const auto num_pieces = static_cast<int64_t>(sizes.size());
  const int64_t expected = CountsBytes(num_pieces);
  if (bytes->size() < expected) {
    return InvalidArgument(
        "`request` must contain a value type, the number of rows for each of "
        "the " +
        to_string(num_pieces) +
        " shards on this server, and the rows. Received: " +
        to_string(bytes->size()) + " bytes, too few");
  }
  LM_RETURN_IF_ERROR(ReadWireType(ReadValue<uint32_t>(bytes->data()), wire));
  for (int64_t p = 0; p < num_pieces; ++p) {
    counts->push_back(ReadValue<uint32_t>(bytes->data() + (1 + p) * kWord));
  }
  *bytes = Skip(*bytes, expected);
  return Status();
}

// Reads the rows of all pieces. `bytes` must not contain other data.
Status ReadPieceRows(const std::vector<PieceSize>& sizes,
                     const std::vector<uint32_t>& counts,
                     Span<const uint8_t> bytes,
                     std::vector<std::vector<uint32_t>>* rows) {
  rows->assign(sizes.size(), {});
  for (size_t p = 0; p < sizes.size(); ++p) {
    uint64_t row = 0;
    const RowsRead read =
        ReadRows(counts[p], sizes[p].num_rows, &bytes, &(*rows)[p], &row);
    if (read == RowsRead::kAll) continue;
    const std::string where =
        " for shard " + to_string(p) + " (table '" + sizes[p].table + "')";
    if (read == RowsRead::kTooFew) {
      return InvalidArgument("`request` must have " + to_string(counts[p]) +
                             " rows" + where + ". Received: too few");
    }
    return InvalidArgument("`request` must have rows below " +
                           to_string(sizes[p].num_rows) + where +
                           ". Received: " + to_string(row));
  }
  if (bytes.empty()) return Status();
  return InvalidArgument("`request` must end with the last row. Received: " +
                         to_string(bytes.size()) + " bytes more");
}

}  // namespace

void WriteNumUpdates(int64_t num_updates, uint8_t* header) {
  static_assert(sizeof(num_updates) == kFetchedHeader);
  Put(num_updates, header);
}

int64_t ReadNumUpdates(const uint8_t* header) {
  return ReadValue<int64_t>(header);
}

int64_t CountsBytes(int64_t num_pieces) { return (1 + num_pieces) * kWord; }

void WriteCounts(RowType wire, const std::vector<uint32_t>& counts,
                 uint8_t* bytes) {
  bytes = Put(static_cast<uint32_t>(wire), bytes);
  for (const uint32_t count : counts) bytes = Put(count, bytes);
}

int64_t FetchWriter::size() const {
  return CountsBytes(counts.size()) + rows.size();
}

void FetchWriter::Write(uint8_t* bytes) const {
  WriteCounts(wire, counts, bytes);
  std::copy(rows.begin(), rows.end(), bytes + CountsBytes(counts.size()));
}

int64_t ApplyWriter::size() const {
  return ApplyHeader::kNumBytes + CountsBytes(counts.size()) +
         hyperparameters.size() * sizeof(float) + num_values * WireBytes(wire) +
         rows.size();
}

uint8_t* ApplyWriter::Write(uint8_t* bytes) const {
  bytes = Put(header.token.epoch, bytes);
  bytes = Put(header.token.number, bytes);
  bytes = Put(header.token.attempt, bytes);
  bytes = Put(header.num_updates, bytes);
  WriteCounts(wire, counts, bytes);
  bytes += CountsBytes(counts.size());
  for (const float one : hyperparameters) bytes = Put(one, bytes);
  std::copy(rows.begin(), rows.end(), bytes + num_values * WireBytes(wire));
  return bytes;
}

Status FetchMessage::Read(Span<const uint8_t> bytes,
                          const std::vector<PieceSize>& sizes) {
  std::vector<uint32_t> counts;
  LM_RETURN_IF_ERROR(ReadCounts(sizes, &bytes, &wire, &counts));
  return ReadPieceRows(sizes, counts, bytes, &rows);
}

Status ApplyMessage::Read(Span<const uint8_t> bytes,
                          const std::vector<PieceSize>& sizes) {
  if (bytes.size() < ApplyHeader::kNumBytes) {
    return InvalidArgument("`request` must begin with a closure header of " +
                           to_string(ApplyHeader::kNumBytes) +
                           " bytes. Received: " + to_string(bytes.size()) +
                           " bytes");
  }
  header.token.epoch = ReadValue<int64_t>(bytes.data());
  header.token.number = ReadValue<int64_t>(bytes.data() + 8);
  header.token.attempt = ReadValue<int64_t>(bytes.data() + 16);
  header.num_updates = ReadValue<int64_t>(bytes.data() + 24);
  bytes = Skip(bytes, ApplyHeader::kNumBytes);
  std::vector<uint32_t> counts;
  LM_RETURN_IF_ERROR(ReadCounts(sizes, &bytes, &wire, &counts));
  // The counts are limited to the number of received bytes plus one, so that
  // the sums cannot overflow. A count that is too large for the message is also
  // too large after it is limited.
  const int64_t most = bytes.size() + 1;
  int64_t num_hyperparameters = 0, num_values = 0;
  for (size_t p = 0; p < sizes.size(); ++p) {
    num_hyperparameters += std::min(sizes[p].num_hyperparameters, most);
    num_values +=
        std::min<int64_t>(counts[p], most) * std::min(sizes[p].dim, most);
  }
  const int64_t value_bytes =
      num_hyperparameters * sizeof(float) + num_values * WireBytes(wire);
  if (bytes.size() < value_bytes) {
    return InvalidArgument(
        "`request` must contain the hyperparameters of all shards on this "
        "server and a gradient for each row (" +
        to_string(value_bytes) + " bytes), followed by the rows. Received: " +
        to_string(bytes.size()) + " bytes");
  }
  const auto* next = reinterpret_cast<const float*>(bytes.data());
  hyperparameters.clear();
  for (const PieceSize& size : sizes) {
    hyperparameters.emplace_back(next, size.num_hyperparameters);
    next += size.num_hyperparameters;
  }
  if (wire == RowType::kFloat32) {
    gradients = {next, num_values};
  } else {
    half_gradients = {reinterpret_cast<const uint16_t*>(next), num_values};
  }
  return ReadPieceRows(sizes, counts, Skip(bytes, value_bytes), &rows);
}

namespace {

constexpr int64_t kJoinedHeader = sizeof(int64_t);

// Returns the size of a message with the zeros that follow it.
int64_t PaddedBytes(int64_t num_bytes) {
  constexpr int64_t kAlignment = sizeof(int64_t);
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns the offset of the `fetch` message in a `joined` message.
int64_t OffsetOfFetch(int64_t apply_bytes) {
  return kJoinedHeader + PaddedBytes(apply_bytes);
}

}  // namespace

int64_t JoinedBytes(int64_t apply_bytes, int64_t fetch_bytes) {
  return OffsetOfFetch(apply_bytes) + fetch_bytes;
}

uint8_t* WriteJoined(int64_t apply_bytes, Span<const uint8_t> fetch,
                     uint8_t* bytes) {
  uint8_t* const apply = Put(apply_bytes, bytes);
  uint8_t* const end = bytes + OffsetOfFetch(apply_bytes);
  std::fill(apply + apply_bytes, end, uint8_t{0});
  std::copy(fetch.begin(), fetch.end(), end);
  return apply;
}

Status JoinedMessage::Read(Span<const uint8_t> bytes) {
  const int64_t rest = bytes.size() - kJoinedHeader;
  const int64_t apply_bytes = rest < 0 ? -1 : ReadValue<int64_t>(bytes.data());
  // The comparison with `rest` prevents an overflow in `OffsetOfFetch`.
  if (apply_bytes < 0 || apply_bytes > rest ||
      OffsetOfFetch(apply_bytes) > bytes.size()) {
    return InvalidArgument(
        "`request` must contain the size of an update, the update, and the "
        "rows to read. Received: " +
        to_string(bytes.size()) + " bytes, too few");
  }
  apply = {bytes.data() + kJoinedHeader, apply_bytes};
  fetch = Skip(bytes, OffsetOfFetch(apply_bytes));
  return Status();
}

int64_t BundleBytes(const std::vector<Span<const uint8_t>>& messages) {
  int64_t size = 0;
  for (const Span<const uint8_t>& message : messages) {
    size += sizeof(int64_t) + PaddedBytes(message.size());
  }
  return size;
}

void WriteBundle(const std::vector<Span<const uint8_t>>& messages,
                 uint8_t* bytes) {
  for (const Span<const uint8_t>& message : messages) {
    bytes = Put(static_cast<int64_t>(message.size()), bytes);
  }
  for (const Span<const uint8_t>& message : messages) {
    uint8_t* const end = std::copy(message.begin(), message.end(), bytes);
    bytes += PaddedBytes(message.size());
    std::fill(end, bytes, uint8_t{0});
  }
}

Status ReadBundle(Span<const uint8_t> bytes, int64_t num_messages,
                  std::vector<Span<const uint8_t>>* messages) {
  messages->clear();
  const int64_t header = num_messages * sizeof(int64_t);
  int64_t offset = header;
  for (int64_t i = 0; i < num_messages && offset <= bytes.size(); ++i) {
    const auto size = ReadValue<int64_t>(bytes.data() + i * sizeof(int64_t));
    const int64_t rest = bytes.size() - offset;
    // The comparison with `rest` prevents an overflow in `PaddedBytes`.
    if (size < 0 || size > rest || PaddedBytes(size) > rest) break;
    messages->emplace_back(bytes.data() + offset, size);
    offset += PaddedBytes(size);
  }
  if (static_cast<int64_t>(messages->size()) == num_messages &&
      offset == bytes.size()) {
    return Status();
  }
  return InvalidArgument(
      "`request` must contain the sizes of " + to_string(num_messages) +
      " messages, followed by the messages. Received: " +
      to_string(bytes.size()) + " bytes, which do not match the sizes");
}

}  // namespace layoutmap
