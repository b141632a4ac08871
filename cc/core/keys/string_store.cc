#include "cc/core/keys/string_store.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/keys/bucket_layout.h"

namespace layoutmap {
namespace {

constexpr size_t kMinSlots = 16;

}  // namespace

std::string_view StringStore::TextOf(const Slot& slot) {
  uint32_t length;
  std::memcpy(&length, slot.text.get(), sizeof(length));
  return {slot.text.get() + sizeof(length), length};
}

size_t StringStore::HomeOf(int64_t key) const {
  return MixBits(static_cast<uint64_t>(key)) & (slots_.size() - 1);
}

size_t StringStore::SlotOf(int64_t key) const {
  size_t slot = HomeOf(key);
  while (slots_[slot].text != nullptr && slots_[slot].key != key) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slot;
}

bool StringStore::Find(int64_t key, std::string_view* text) const {
  if (slots_.empty()) return false;
  const Slot& slot = slots_[SlotOf(key)];
  if (slot.text == nullptr) return false;
  *text = TextOf(slot);
  return true;
}

void StringStore::PrefetchSlot(int64_t key) const {
  if (!slots_.empty()) __builtin_prefetch(&slots_[HomeOf(key)]);
}

void StringStore::PrefetchText(int64_t key) const {
  if (slots_.empty()) return;
  // Most keys are in their first slot, or in the next slot of the cache line.
  const Slot& slot = slots_[HomeOf(key)];
  if (slot.text != nullptr && slot.key == key) {
    __builtin_prefetch(slot.text.get());
  }
}

Status StringStore::Add(int64_t key, std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) {
    return InvalidArgument(
        "A string must have less than 4 GiB. Received: a string of " +
        std::to_string(text.size()) + " bytes");
  }
  // At most three quarters of the slots are used, so that searches are short.
  if (4 * (static_cast<size_t>(size_) + 1) > 3 * slots_.size()) Grow();
  Slot& slot = slots_[SlotOf(key)];
  if (slot.text != nullptr) {
    const std::string_view kept = TextOf(slot);
    if (kept != text) CountCollision(kept, text);
    return Status();
  }
  const auto length = static_cast<uint32_t>(text.size());
  std::unique_ptr<char[]> copy(new char[sizeof(length) + text.size()]);
  std::memcpy(copy.get(), &length, sizeof(length));
  if (!text.empty()) {
    std::memcpy(copy.get() + sizeof(length), text.data(), text.size());
  }
  slot.key = key;
  slot.text = std::move(copy);
  ++size_;
  num_bytes_ += length;
  return Status();
}

void StringStore::CountCollision(std::string_view kept,
                                 std::string_view other) {
  ++num_collisions_;
  if (static_cast<int64_t>(collisions_.size()) == kMaxCollisions) return;
  const bool is_recorded = std::any_of(
      collisions_.begin(), collisions_.end(), [&](const Collision& one) {
        return one.kept == kept && one.other == other;
      });
  if (is_recorded) return;
  collisions_.push_back({std::string(kept), std::string(other)});
}

void StringStore::Remove(int64_t key) {
  if (slots_.empty()) return;
  size_t hole = SlotOf(key);
  if (slots_[hole].text == nullptr) return;
  --size_;
  num_bytes_ -= static_cast<int64_t>(TextOf(slots_[hole]).size());
  slots_[hole].text = nullptr;
  // Moves later keys of the run to the hole, unless their search begins after
  // the hole. A search therefore never ends before it reaches its key.
  const size_t mask = slots_.size() - 1;
  for (size_t next = (hole + 1) & mask; slots_[next].text != nullptr;
       next = (next + 1) & mask) {
    const size_t home = HomeOf(slots_[next].key);
    if (((next - home) & mask) >= ((next - hole) & mask)) {
      slots_[hole] = std::move(slots_[next]);
      slots_[next].text = nullptr;
      hole = next;
    }
  }
}

void StringStore::Clear() { *this = StringStore(); }

std::vector<int64_t> StringStore::NextKeys(int64_t num_slots) {
  std::vector<int64_t> keys;
  const size_t size = std::min(
      static_cast<size_t>(std::max<int64_t>(num_slots, 0)), slots_.size());
  for (size_t i = 0; i < size; ++i) {
    cursor_ = (cursor_ + 1) & (slots_.size() - 1);
    if (slots_[cursor_].text != nullptr) keys.push_back(slots_[cursor_].key);
  }
  return keys;
}

std::vector<int64_t> StringStore::Keys() const {
  std::vector<int64_t> keys;
  keys.reserve(static_cast<size_t>(size_));
  for (const Slot& slot : slots_) {
    if (slot.text != nullptr) keys.push_back(slot.key);
  }
  return keys;
}

void StringStore::Grow() {
  std::vector<Slot> old(std::max(kMinSlots, 2 * slots_.size()));
  old.swap(slots_);
  for (Slot& slot : old) {
    if (slot.text != nullptr) slots_[SlotOf(slot.key)] = std::move(slot);
  }
}

}  // namespace layoutmap
