// The strings whose hashes are the keys of an open vocabulary.

#ifndef TF_LAYOUTMAP_CORE_KEYS_STRING_STORE_H_
#define TF_LAYOUTMAP_CORE_KEYS_STRING_STORE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/memory/block_pool.h"

namespace layoutmap {

// A hash table from keys to strings, and the strings that have the same key as
// another string. The caller must synchronize calls, except for calls of const
// methods, which can run in parallel.
class StringStore {
 public:
  // Two strings with the same key.
  struct Collision {
    std::string kept;
    std::string other;
  };

  // Number of different collisions whose strings are recorded.
  static constexpr int64_t kMaxCollisions = 16;

  // Returns whether the store contains a string for `key`, and sets `text` to
  // the string. The view is valid until the next call of a method that is not
  // const.
  bool Find(int64_t key, std::string_view* text) const;

  // Calls `visit(i, text)` for each key in `keys`, in this order. `text` points
  // to the string of the key, as returned by `Find`, or is null. For many keys,
  // the function is faster than `Find`, because it loads several slots and
  // strings into the cache at the same time.
  template <typename Visit>
  void FindAll(Span<const int64_t> keys, const Visit& visit) const;

  // Begins to load the slot of `key` into the cache, for a later call of `Add`.
  void PrefetchSlot(int64_t key) const;

  // Adds a copy of `text` and sets `kept` to `text`, if the store contains no
  // string for `key`. Otherwise, sets `kept` to the stored string. Returns an
  // error if `text` has 4 GiB or more.
  Status Add(int64_t key, std::string_view text, std::string_view* kept);

  // Calls the other `Add`. If the store contains a different string, counts a
  // collision.
  Status Add(int64_t key, std::string_view text);

  // Counts a lookup of the string `other`, whose key is the key of the stored
  // string `kept`.
  void CountCollision(std::string_view kept, std::string_view other);

  // Removes the string of `key`, if the store contains the key.
  void Remove(int64_t key);

  // Removes all strings and collisions.
  void Clear();

  // Sets each value of `is_selected` to whether the key is selected.
  using Select =
      std::function<void(Span<const int64_t> keys, Span<bool> is_selected)>;

  // Removes the strings of the selected keys in the next `num_slots` slots of
  // the hash table, or in all slots if the table is smaller. Repeated calls
  // visit all slots in turn.
  void RemoveNext(int64_t num_slots, const Select& select);

  // Removes the strings of all selected keys.
  void RemoveAll(const Select& select);

  int64_t size() const { return size_; }
  // Returns the sum of the lengths of all strings.
  int64_t num_bytes() const { return num_bytes_; }
  // Returns the number of bytes of the hash table and of the memory from which
  // strings are allocated.
  int64_t num_memory_bytes() const;
  // Returns the number of lookups that `CountCollision` has counted.
  int64_t num_collisions() const { return num_collisions_; }
  // Returns the first different collisions, at most kMaxCollisions.
  const std::vector<Collision>& collisions() const { return collisions_; }

 private:
  // `text` is 0 if the slot is empty. Otherwise, its lower 40 bits are the
  // place of the entry in the pool, which is not 0, and its upper bits are the
  // length of the string, or kMaxShortLength if the length is larger. `Remove`
  // and the search for a key therefore read no entries.
  struct Slot {
    int64_t key;
    uint64_t text;
  };

  using Place = BlockPool::Place;
  static constexpr uint64_t kMaxShortLength =
      (uint64_t{1} << (64 - BlockPool::kPlaceBits)) - 1;

  // An entry is the length of a string, and the string.
  static constexpr size_t kTextOffset = sizeof(uint32_t);

  // The number of keys whose slots and strings are loaded at the same time.
  static constexpr int64_t kKeysAtOnce = 64;

  static Place PlaceOf(const Slot& slot) {
    return slot.text & ((Place{1} << BlockPool::kPlaceBits) - 1);
  }
  static int64_t EntryBytes(size_t length) {
    return static_cast<int64_t>(kTextOffset + length);
  }
  std::string_view TextOf(const Slot& slot) const;
  size_t LengthOf(const Slot& slot) const;

  // Returns empty slots.
  static std::unique_ptr<Slot[]> NewSlots(size_t num_slots);
  // Returns the slot at which the search for a key begins. There must be slots.
  size_t HomeOf(int64_t key) const {
    return MixBits(static_cast<uint64_t>(key)) & mask_;
  }
  // Returns the slot of `key`, or the empty slot at which the search for the
  // key ends. The search begins at slot `at`. There must be an empty slot.
  size_t SlotOf(int64_t key, size_t at) const {
    while (slots_[at].text != 0 && slots_[at].key != key) at = (at + 1) & mask_;
    return at;
  }

  // Prefetches the slots that most searches from slot `at` visit. They are in
  // one or two cache lines.
  void PrefetchSlots(size_t at) const {
    __builtin_prefetch(&slots_[at]);
    __builtin_prefetch(&slots_[(at + 3) & mask_]);
  }

  size_t NumSlots() const { return slots_ == nullptr ? 0 : mask_ + 1; }
  void Grow();
  // Moves all entries to a new pool.
  void MoveEntries();
  // Removes the strings of the selected keys in `num_slots` slots, which begin
  // with slot `first`.
  void RemoveSelected(size_t first, size_t num_slots, const Select& select);

  // The number of slots is 0 or a power of 2. Keys are found by linear probing.
  std::unique_ptr<Slot[]> slots_;
  // If there are slots, their number minus 1.
  size_t mask_ = 0;
  BlockPool pool_;
  size_t cursor_ = 0;
  int64_t size_ = 0;
  int64_t num_bytes_ = 0;
  int64_t num_collisions_ = 0;
  std::vector<Collision> collisions_;
};

inline std::string_view StringStore::TextOf(const Slot& slot) const {
  const char* const entry = pool_.At(PlaceOf(slot));
  uint32_t length;
  std::memcpy(&length, entry, sizeof(length));
  return {entry + kTextOffset, length};
}

template <typename Visit>
void StringStore::FindAll(Span<const int64_t> keys, const Visit& visit) const {
  if (slots_ == nullptr) {
    for (int64_t i = 0; i < keys.size(); ++i) visit(i, nullptr);
    return;
  }
  size_t at[kKeysAtOnce];
  for (int64_t first = 0; first < keys.size(); first += kKeysAtOnce) {
    const int64_t size = std::min(kKeysAtOnce, keys.size() - first);
    for (int64_t i = 0; i < size; ++i) {
      at[i] = HomeOf(keys[first + i]);
      PrefetchSlots(at[i]);
    }
    for (int64_t i = 0; i < size; ++i) {
      at[i] = SlotOf(keys[first + i], at[i]);
      const Slot& slot = slots_[at[i]];
      if (slot.text != 0) __builtin_prefetch(pool_.At(PlaceOf(slot)));
    }
    for (int64_t i = 0; i < size; ++i) {
      const Slot& slot = slots_[at[i]];
      if (slot.text == 0) {
        visit(first + i, nullptr);
        continue;
      }
      const std::string_view text = TextOf(slot);
      visit(first + i, &text);
    }
  }
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_STRING_STORE_H_
