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

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/memory/block_pool.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {
namespace {

constexpr size_t kMinSlots = 16;

// If the returned entries take more memory than the stored entries and this
// number of bytes, the stored entries are moved to a new pool.
constexpr int64_t kMaxFreeBytes = int64_t{1} << 20;

}  // namespace

std::unique_ptr<StringStore::Slot[]> StringStore::NewSlots(size_t num_slots) {
  std::unique_ptr<Slot[]> slots(new Slot[num_slots]);
  AdviseHugePages(slots.get(), num_slots * sizeof(Slot));
  std::fill_n(slots.get(), num_slots, Slot{0, 0});
  return slots;
}

size_t StringStore::LengthOf(const Slot& slot) const {
  const uint64_t length = slot.text >> BlockPool::kPlaceBits;
  return length < kMaxShortLength ? length : TextOf(slot).size();
}

bool StringStore::Find(int64_t key, std::string_view* text) const {
  if (slots_ == nullptr) return false;
  const Slot& slot = slots_[SlotOf(key, HomeOf(key))];
  if (slot.text == 0) return false;
  *text = TextOf(slot);
  return true;
}

void StringStore::PrefetchSlot(int64_t key) const {
  if (slots_ != nullptr) PrefetchSlots(HomeOf(key));
}

Status StringStore::Add(int64_t key, std::string_view text,
                        std::string_view* kept) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) {
    return InvalidArgument(
        "A string must have less than 4 GiB. Received: a string of " +
        std::to_string(text.size()) + " bytes");
  }
  size_t at = 0;
  if (slots_ != nullptr) {
    at = SlotOf(key, HomeOf(key));
    if (slots_[at].text != 0) {
      *kept = TextOf(slots_[at]);
      return Status();
    }
  }
  // At most three quarters of the slots are used, so that searches are short.
  if (4 * (static_cast<size_t>(size_) + 1) > 3 * NumSlots()) {
    Grow();
    at = SlotOf(key, HomeOf(key));
  }
  const auto length = static_cast<uint32_t>(text.size());
  const Place place = pool_.Take(EntryBytes(length));
  char* const entry = pool_.At(place);
  std::memcpy(entry, &length, sizeof(length));
  if (length > 0) std::memcpy(entry + kTextOffset, text.data(), length);
  const uint64_t short_length = std::min<uint64_t>(length, kMaxShortLength);
  slots_[at] = {key, short_length << BlockPool::kPlaceBits | place};
  ++size_;
  num_bytes_ += length;
  // A comparison of the caller would wait until the copy is in the cache.
  *kept = text;
  return Status();
}

Status StringStore::Add(int64_t key, std::string_view text) {
  std::string_view kept;
  LM_RETURN_IF_ERROR(Add(key, text, &kept));
  if (kept != text) CountCollision(kept, text);
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
  if (slots_ == nullptr) return;
  size_t hole = SlotOf(key, HomeOf(key));
  const Slot removed = slots_[hole];
  if (removed.text == 0) return;
  const size_t length = LengthOf(removed);
  pool_.Return(PlaceOf(removed), EntryBytes(length));
  slots_[hole].text = 0;
  --size_;
  num_bytes_ -= static_cast<int64_t>(length);
  // Moves later keys of the run to the hole, unless their search begins after
  // the hole. A search therefore never ends before it reaches its key.
  for (size_t next = (hole + 1) & mask_; slots_[next].text != 0;
       next = (next + 1) & mask_) {
    const size_t home = HomeOf(slots_[next].key);
    if (((next - home) & mask_) < ((next - hole) & mask_)) continue;
    slots_[hole] = slots_[next];
    slots_[next].text = 0;
    hole = next;
  }
  if (pool_.num_free_bytes() > pool_.num_used_bytes() + kMaxFreeBytes) {
    MoveEntries();
  }
}

void StringStore::Clear() { *this = StringStore(); }

void StringStore::RemoveNext(int64_t num_slots, const Select& select) {
  const size_t size = std::min(
      static_cast<size_t>(std::max<int64_t>(num_slots, 0)), NumSlots());
  if (size == 0) return;
  const size_t first = (cursor_ + 1) & mask_;
  cursor_ = (cursor_ + size) & mask_;
  RemoveSelected(first, size, select);
}

void StringStore::RemoveAll(const Select& select) {
  RemoveSelected(0, NumSlots(), select);
}

void StringStore::RemoveSelected(size_t first, size_t num_slots,
                                 const Select& select) {
  const RawArray<int64_t> keys(static_cast<int64_t>(num_slots));
  int64_t num_keys = 0;
  for (size_t i = 0; i < num_slots; ++i) {
    // The loop has no branch that depends on the slot, because the processor
    // could not predict it.
    const Slot& slot = slots_[(first + i) & mask_];
    keys[num_keys] = slot.key;
    num_keys += slot.text != 0;
  }
  const RawArray<bool> is_selected(num_keys);
  select({keys.data(), num_keys}, is_selected);
  for (int64_t i = 0; i < num_keys; ++i) {
    if (is_selected[i]) Remove(keys[i]);
  }
}

int64_t StringStore::num_memory_bytes() const {
  return static_cast<int64_t>(NumSlots() * sizeof(Slot)) +
         pool_.num_block_bytes();
}

void StringStore::Grow() {
  const size_t num_old = NumSlots();
  const size_t num_slots = std::max(kMinSlots, 2 * num_old);
  const std::unique_ptr<Slot[]> old =
      std::exchange(slots_, NewSlots(num_slots));
  mask_ = num_slots - 1;
  for (size_t i = 0; i < num_old; ++i) {
    if (old[i].text == 0) continue;
    slots_[SlotOf(old[i].key, HomeOf(old[i].key))] = old[i];
  }
}

void StringStore::MoveEntries() {
  BlockPool pool;
  std::unique_ptr<Slot[]> slots = NewSlots(NumSlots());
  for (size_t i = 0; i < NumSlots(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.text == 0) continue;
    const int64_t num_bytes = EntryBytes(LengthOf(slot));
    const Place place = pool.Take(num_bytes);
    std::memcpy(pool.At(place), pool_.At(PlaceOf(slot)),
                static_cast<size_t>(num_bytes));
    slots[i] = {slot.key, slot.text - PlaceOf(slot) + place};
  }
  slots_ = std::move(slots);
  pool_ = std::move(pool);
}

}  // namespace layoutmap
