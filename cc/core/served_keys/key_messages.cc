#include "cc/core/served_keys/key_messages.h"

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

constexpr int64_t kStart = 4 * sizeof(int64_t);
constexpr int64_t kWord = sizeof(uint32_t);

int64_t RoundUp(int64_t size) { return (size + 7) / 8 * 8; }

// Returns the size in bytes of the message header, which contains the token,
// the training flag, the value type, the counts and the kinds.
int64_t HeaderBytes(int64_t num_pieces) {
  return RoundUp(kStart + (1 + 2 * num_pieces) * kWord);
}

template <typename T>
T ReadValue(const uint8_t** bytes) {
  T value;
  std::memcpy(&value, *bytes, sizeof(value));
  *bytes += sizeof(value);
  return value;
}

template <typename T>
void Put(T value, uint8_t** bytes) {
  std::memcpy(*bytes, &value, sizeof(value));
  *bytes += sizeof(value);
}

Status TooShortError(int64_t size) {
  return InvalidArgument(
      "`request` must contain the closure, the value type and, for each shard "
      "on this server, the number of rows or keys and the rows or keys. "
      "Received: " +
      to_string(size) + " bytes, too few");
}

// Converts cumulative sums of the numbers of uses to one number of uses per
// key.
Status ToUseCounts(const std::string& where, std::vector<uint32_t>* sums,
                   int64_t* num_uses) {
  uint32_t last = 0;
  for (uint32_t& one : *sums) {
    const uint32_t sum = one;
    one -= last;
    last = sum;
    if (one > 0) continue;
    return InvalidArgument("`request` must have at least one use of each key" +
                           where + ". Received: a key without uses");
  }
  *num_uses += last;
  if (*num_uses <= kMaxUses) return Status();
  return InvalidArgument("`request` must have at most " + to_string(kMaxUses) +
                         " uses of keys. Received: more" + where);
}

}  // namespace

int64_t FetchedKeysHeader(int64_t num_keys) {
  return RoundUp(kFetchedHeader + num_keys * kWord);
}

int64_t KeyFetchWriter::size() const {
  int64_t size = HeaderBytes(pieces.size());
  for (const Asked& one : pieces) {
    size += one.keys.size() * sizeof(int64_t) + one.compact.size();
  }
  return size;
}

void KeyFetchWriter::Write(uint8_t* bytes) const {
  uint8_t* const values = bytes + HeaderBytes(pieces.size());
  Put(token.epoch, &bytes);
  Put(token.number, &bytes);
  Put(token.attempt, &bytes);
  Put(training ? token.call + 1 : int64_t{0}, &bytes);
  Put(static_cast<uint32_t>(wire), &bytes);
  for (const Asked& one : pieces) Put(one.count, &bytes);
  for (const Asked& one : pieces) Put(one.kind, &bytes);
  std::fill(bytes, values, 0);
  bytes = values;
  for (const Asked& one : pieces) {
    for (const int64_t key : one.keys) Put(key, &bytes);
  }
  for (const Asked& one : pieces) {
    bytes = std::copy(one.compact.begin(), one.compact.end(), bytes);
  }
}

bool KeyFetchMessage::IsTraining(Span<const uint8_t> bytes) {
  if (bytes.size() < kStart) return false;
  const uint8_t* next = bytes.data() + kStart - sizeof(int64_t);
  return ReadValue<int64_t>(&next) != 0;
}

Status KeyFetchMessage::Read(Span<const uint8_t> bytes,
                             const std::vector<PieceSize>& sizes,
                             const std::vector<bool>& is_open) {
  const auto num_pieces = static_cast<int64_t>(sizes.size());
  if (bytes.size() < HeaderBytes(num_pieces)) {
    return TooShortError(bytes.size());
  }
  const uint8_t* next = bytes.data();
  token.epoch = ReadValue<int64_t>(&next);
  token.number = ReadValue<int64_t>(&next);
  token.attempt = ReadValue<int64_t>(&next);
  const int64_t number_of_call = ReadValue<int64_t>(&next);
  if (number_of_call < 0) {
    return InvalidArgument(
        "`request` must have a number of a lookup that is not negative. "
        "Received: " +
        to_string(number_of_call));
  }
  training = number_of_call > 0;
  token.call = training ? number_of_call - 1 : 0;
  LM_RETURN_IF_ERROR(ReadWireType(ReadValue<uint32_t>(&next), &wire));
  std::vector<uint32_t> counts(num_pieces);
  for (uint32_t& one : counts) one = ReadValue<uint32_t>(&next);
  kinds.resize(num_pieces);
  for (uint32_t& one : kinds) one = ReadValue<uint32_t>(&next);
  bytes = {bytes.data() + HeaderBytes(num_pieces),
           bytes.size() - HeaderBytes(num_pieces)};
  next = bytes.data();
  rows.assign(num_pieces, {});
  keys.assign(num_pieces, {});
  for (int64_t p = 0; p < num_pieces; ++p) {
    if (!is_open[p]) continue;
    const int64_t size = counts[p] * int64_t{sizeof(int64_t)};
    // The size is checked before the memory for the keys is allocated.
    if (size > bytes.size()) return TooShortError(bytes.size());
    keys[p].keys.resize(counts[p]);
    if (size > 0) std::memcpy(keys[p].keys.data(), bytes.data(), size);
    bytes = {bytes.data() + size, bytes.size() - size};
  }
  int64_t num_uses = 0;
  for (int64_t p = 0; p < num_pieces; ++p) {
    const std::string where =
        " for shard " + to_string(p) + " (table '" + sizes[p].table + "')";
    std::vector<uint32_t>* const to = is_open[p] ? &keys[p].times : &rows[p];
    const int64_t below = is_open[p] ? kMaxUses + 1 : sizes[p].num_rows;
    uint64_t found = 0;
    switch (ReadRows(counts[p], below, &bytes, to, &found)) {
      case RowsRead::kAll:
        break;
      case RowsRead::kTooFew:
        return InvalidArgument("`request` must have " + to_string(counts[p]) +
                               (is_open[p] ? " uses" : " rows") + where +
                               ". Received: too few");
      case RowsRead::kOutOfRange:
        return InvalidArgument("`request` must have " +
                               std::string(is_open[p] ? "uses" : "rows") +
                               " below " + to_string(below) + where +
                               ". Received: " + to_string(found));
    }
    if (is_open[p]) LM_RETURN_IF_ERROR(ToUseCounts(where, to, &num_uses));
  }
  if (bytes.empty()) return Status();
  return InvalidArgument("`request` must end with the last row. Received: " +
                         to_string(bytes.size()) + " bytes more");
}

}  // namespace layoutmap
