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

#include "cc/core/base/parallel_for.h"
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

  // Adds a copy of `text`, if the store contains no string for `key`. Sets
  // `kept` to the string that the store then contains, as `Find` does. Returns
  // an error if `text` has 4 GiB or more.
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
  // visit all slots in turn. `select` is called in parallel. Which strings are
  // removed does not depend on the number of threads.
  void RemoveNext(int64_t num_slots, const Select& select,
                  const ParallelFor& parallel_for);

  // Removes the strings of all selected keys.
  void RemoveAll(const Select& select, const ParallelFor& parallel_for);

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
  // A slot is 0 if it is empty. Otherwise, it contains these bits:
  //
  //   0 to 39    place of the entry in the pool, which is not 0
  //   40 to 47   distance from the first slot of the search for the key, or
  //              kMaxDistance if the distance is larger
  //   48 to 63   tag: the upper bits of the hash of the key
  //
  // The tags of different keys can be equal. A search therefore compares the
  // key in the entry if the tag is equal, and reads no other entries. The
  // distance lets `Remove` move slots without reading their entries.
  using Slot = uint64_t;
  using Place = BlockPool::Place;
  static constexpr int kDistanceBits = 8;
  static constexpr uint64_t kMaxDistance = (1 << kDistanceBits) - 1;
  static constexpr int kTagShift = BlockPool::kPlaceBits + kDistanceBits;

  // The number of keys whose slots and strings are loaded at the same time.
  static constexpr int64_t kKeysAtOnce = 32;

  // An entry is a key, the length of its string, and the string.
  static constexpr size_t kLengthOffset = sizeof(int64_t);
  static constexpr size_t kTextOffset = kLengthOffset + sizeof(uint32_t);

  static Place PlaceOf(Slot slot) {
    return slot & ((Slot{1} << BlockPool::kPlaceBits) - 1);
  }
  static uint64_t DistanceOf(Slot slot) {
    return slot >> BlockPool::kPlaceBits & kMaxDistance;
  }
  static uint64_t HashOf(int64_t key) {
    return MixBits(static_cast<uint64_t>(key));
  }
  static Slot MakeSlot(uint64_t hash, uint64_t distance, Place place) {
    return hash >> kTagShift << kTagShift |
           std::min(distance, kMaxDistance) << BlockPool::kPlaceBits | place;
  }

  static Slot WithDistance(Slot slot, uint64_t distance) {
    return (slot & ~(kMaxDistance << BlockPool::kPlaceBits)) |
           std::min(distance, kMaxDistance) << BlockPool::kPlaceBits;
  }
  static int64_t EntryBytes(size_t length) {
    return static_cast<int64_t>(kTextOffset + length);
  }
  // Returns empty slots.
  static std::unique_ptr<Slot[]> NewSlots(size_t num_slots);

  int64_t KeyOf(Slot slot) const;
  std::string_view TextOf(Slot slot) const;

  // Returns the first slot, from `at` on, that is empty or has the tag of
  // `hash`. The table must have an empty slot.
  size_t NextMatch(uint64_t hash, size_t at) const {
    const uint64_t tag = hash >> kTagShift;
    while (slots_[at] != 0 && slots_[at] >> kTagShift != tag) {
      at = (at + 1) & mask_;
    }
    return at;
  }
  // Returns the slot of `key`, or the empty slot at which the search for the
  // key ends. The search begins at slot `at`.
  size_t SlotOf(int64_t key, uint64_t hash, size_t at) const {
    for (;; at = (at + 1) & mask_) {
      at = NextMatch(hash, at);
      if (slots_[at] == 0 || KeyOf(slots_[at]) == key) return at;
    }
  }
  // Calls `visit(i, hash, at)` for each key. `hash` is the hash of the key, and
  // `at` is the slot at which the search for the key can begin. The entry in
  // this slot is loaded into the cache. There must be slots, and `visit` must
  // not change them.
  template <typename Visit>
  void FindSlots(Span<const int64_t> keys, const Visit& visit) const;

  size_t NumSlots() const { return slots_ == nullptr ? 0 : mask_ + 1; }
  void Grow();
  // Moves all entries to a new pool.
  void MoveEntries();
  // Removes the strings of the selected keys in `num_slots` slots, which begin
  // with slot `first`.
  void RemoveSelected(size_t first, size_t num_slots, const Select& select,
                      const ParallelFor& parallel_for);

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

inline int64_t StringStore::KeyOf(Slot slot) const {
  int64_t key;
  std::memcpy(&key, pool_.At(PlaceOf(slot)), sizeof(key));
  return key;
}

inline std::string_view StringStore::TextOf(Slot slot) const {
  const char* const entry = pool_.At(PlaceOf(slot));
  uint32_t length;
  std::memcpy(&length, entry + kLengthOffset, sizeof(length));
  return {entry + kTextOffset, length};
}

template <typename Visit>
void StringStore::FindSlots(Span<const int64_t> keys,
                            const Visit& visit) const {
  uint64_t hashes[kKeysAtOnce];
  size_t at[kKeysAtOnce];
  for (int64_t first = 0; first < keys.size(); first += kKeysAtOnce) {
    const int64_t size = std::min(kKeysAtOnce, keys.size() - first);
    for (int64_t i = 0; i < size; ++i) {
      hashes[i] = HashOf(keys[first + i]);
      __builtin_prefetch(&slots_[hashes[i] & mask_]);
    }
    for (int64_t i = 0; i < size; ++i) {
      at[i] = NextMatch(hashes[i], hashes[i] & mask_);
      const Slot slot = slots_[at[i]];
      if (slot != 0) __builtin_prefetch(pool_.At(PlaceOf(slot)));
    }
    for (int64_t i = 0; i < size; ++i) visit(first + i, hashes[i], at[i]);
  }
}

template <typename Visit>
void StringStore::FindAll(Span<const int64_t> keys, const Visit& visit) const {
  if (slots_ == nullptr) {
    for (int64_t i = 0; i < keys.size(); ++i) visit(i, nullptr);
    return;
  }
  FindSlots(keys, [&](int64_t i, uint64_t hash, size_t at) {
    const Slot slot = slots_[SlotOf(keys[i], hash, at)];
    if (slot == 0) return visit(i, nullptr);
    const std::string_view text = TextOf(slot);
    visit(i, &text);
  });
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_STRING_STORE_H_
