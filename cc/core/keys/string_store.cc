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

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/memory/block_pool.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {
namespace {

constexpr size_t kMinSlots = 16;

// The distance at which entries are prefetched, in slots.
constexpr size_t kSlotsAhead = 32;

// If the returned entries take more memory than the stored entries and this
// number of bytes, the stored entries are moved to a new pool.
constexpr int64_t kMaxFreeBytes = int64_t{1} << 20;

}  // namespace

std::unique_ptr<StringStore::Slot[]> StringStore::NewSlots(size_t num_slots) {
  std::unique_ptr<Slot[]> slots(new Slot[num_slots]);
  AdviseHugePages(slots.get(), num_slots * sizeof(Slot));
  std::fill_n(slots.get(), num_slots, 0);
  return slots;
}

bool StringStore::Find(int64_t key, std::string_view* text) const {
  if (slots_ == nullptr) return false;
  const uint64_t hash = HashOf(key);
  const Slot slot = slots_[SlotOf(key, hash, hash & mask_)];
  if (slot == 0) return false;
  *text = TextOf(slot);
  return true;
}

void StringStore::PrefetchSlot(int64_t key) const {
  if (slots_ != nullptr) __builtin_prefetch(&slots_[HashOf(key) & mask_]);
}

Status StringStore::Add(int64_t key, std::string_view text,
                        std::string_view* kept) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) {
    return InvalidArgument(
        "A string must have less than 4 GiB. Received: a string of " +
        std::to_string(text.size()) + " bytes");
  }
  const uint64_t hash = HashOf(key);
  size_t at = 0;
  if (slots_ != nullptr) {
    at = SlotOf(key, hash, hash & mask_);
    if (slots_[at] != 0) {
      *kept = TextOf(slots_[at]);
      return Status();
    }
  }
  // At most three quarters of the slots are used, so that searches are short.
  if (4 * (static_cast<size_t>(size_) + 1) > 3 * NumSlots()) {
    Grow();
    at = SlotOf(key, hash, hash & mask_);
  }
  const auto length = static_cast<uint32_t>(text.size());
  const Place place = pool_.Take(EntryBytes(length));
  char* const entry = pool_.At(place);
  std::memcpy(entry, &key, sizeof(key));
  std::memcpy(entry + kLengthOffset, &length, sizeof(length));
  if (length > 0) std::memcpy(entry + kTextOffset, text.data(), length);
  slots_[at] = MakeSlot(hash, (at - hash) & mask_, place);
  ++size_;
  num_bytes_ += length;
  *kept = {entry + kTextOffset, length};
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
  const uint64_t hash = HashOf(key);
  size_t hole = SlotOf(key, hash, hash & mask_);
  const Slot removed = slots_[hole];
  if (removed == 0) return;
  const size_t length = TextOf(removed).size();
  pool_.Return(PlaceOf(removed), EntryBytes(length));
  slots_[hole] = 0;
  --size_;
  num_bytes_ -= static_cast<int64_t>(length);
  // Moves later keys of the run to the hole, unless their search begins after
  // the hole. A search therefore never ends before it reaches its key.
  for (size_t next = (hole + 1) & mask_; slots_[next] != 0;
       next = (next + 1) & mask_) {
    const Slot slot = slots_[next];
    uint64_t distance = DistanceOf(slot);
    if (distance == kMaxDistance)
      distance = (next - HashOf(KeyOf(slot))) & mask_;
    const uint64_t moved_by = (next - hole) & mask_;
    if (distance < moved_by) continue;
    slots_[hole] = WithDistance(slot, distance - moved_by);
    slots_[next] = 0;
    hole = next;
  }
  if (pool_.num_free_bytes() > pool_.num_used_bytes() + kMaxFreeBytes) {
    MoveEntries();
  }
}

void StringStore::Clear() { *this = StringStore(); }

void StringStore::RemoveNext(int64_t num_slots, const Select& select,
                             const ParallelFor& parallel_for) {
  const size_t size = std::min(
      static_cast<size_t>(std::max<int64_t>(num_slots, 0)), NumSlots());
  if (size == 0) return;
  const size_t first = (cursor_ + 1) & mask_;
  cursor_ = (cursor_ + size) & mask_;
  RemoveSelected(first, size, select, parallel_for);
}

void StringStore::RemoveAll(const Select& select,
                            const ParallelFor& parallel_for) {
  RemoveSelected(0, NumSlots(), select, parallel_for);
}

void StringStore::RemoveSelected(size_t first, size_t num_slots,
                                 const Select& select,
                                 const ParallelFor& parallel_for) {
  constexpr size_t kSlotsPerPart = 1024;
  constexpr int64_t kNanosecondsPerSlot = 10;
  const size_t num_parts = (num_slots + kSlotsPerPart - 1) / kSlotsPerPart;
  // The selected keys of a part begin at the number of its first slot.
  const RawArray<int64_t> selected(static_cast<int64_t>(num_slots));
  const RawArray<int64_t> num_selected(static_cast<int64_t>(num_parts));
  const auto select_in_part = [&](size_t part) {
    const size_t begin = part * kSlotsPerPart;
    const size_t end = std::min(begin + kSlotsPerPart, num_slots);
    int64_t keys[kSlotsPerPart];
    bool is_selected[kSlotsPerPart];
    int64_t num_keys = 0;
    for (size_t i = begin; i < end; ++i) {
      const Slot ahead = slots_[(first + i + kSlotsAhead) & mask_];
      if (ahead != 0) __builtin_prefetch(pool_.At(PlaceOf(ahead)));
      const Slot slot = slots_[(first + i) & mask_];
      if (slot != 0) keys[num_keys++] = KeyOf(slot);
    }
    select({keys, num_keys}, {is_selected, num_keys});
    int64_t* const out = selected.data() + begin;
    int64_t num_out = 0;
    for (int64_t i = 0; i < num_keys; ++i) {
      out[num_out] = keys[i];
      num_out += is_selected[i];
    }
    num_selected[part] = num_out;
  };
  parallel_for(static_cast<int64_t>(num_parts),
               kNanosecondsPerSlot * static_cast<int64_t>(kSlotsPerPart),
               [&](int64_t begin, int64_t end) {
                 for (int64_t part = begin; part < end; ++part) {
                   select_in_part(static_cast<size_t>(part));
                 }
               });
  for (size_t part = 0; part < num_parts; ++part) {
    const int64_t* const keys = selected.data() + part * kSlotsPerPart;
    for (int64_t i = 0; i < num_selected[part]; ++i) Remove(keys[i]);
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
    if (i + kSlotsAhead < num_old && old[i + kSlotsAhead] != 0) {
      __builtin_prefetch(pool_.At(PlaceOf(old[i + kSlotsAhead])));
    }
    if (old[i] == 0) continue;
    const uint64_t hash = HashOf(KeyOf(old[i]));
    size_t at = hash & mask_;
    while (slots_[at] != 0) at = (at + 1) & mask_;
    slots_[at] = MakeSlot(hash, (at - hash) & mask_, PlaceOf(old[i]));
  }
}

void StringStore::MoveEntries() {
  BlockPool pool;
  std::unique_ptr<Slot[]> slots = NewSlots(NumSlots());
  for (size_t i = 0; i < NumSlots(); ++i) {
    const Slot slot = slots_[i];
    if (slot == 0) continue;
    const auto num_bytes = EntryBytes(TextOf(slot).size());
    const Place place = pool.Take(num_bytes);
    std::memcpy(pool.At(place), pool_.At(PlaceOf(slot)), num_bytes);
    slots[i] = slot - PlaceOf(slot) + place;
  }
  slots_ = std::move(slots);
  pool_ = std::move(pool);
}

}  // namespace layoutmap
