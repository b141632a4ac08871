// The strings whose hashes are the keys of an open vocabulary.

#ifndef TF_LAYOUTMAP_CORE_KEYS_STRING_STORE_H_
#define TF_LAYOUTMAP_CORE_KEYS_STRING_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cc/core/base/status.h"

namespace layoutmap {

// A hash table from keys to strings, and the strings that have the same key as
// another string. The caller must synchronize calls.
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

  // Begins to load the slot of `key` into the cache. A slot that was loaded
  // contains the address of the string, which `PrefetchText` begins to load.
  // The methods have no other effect.
  void PrefetchSlot(int64_t key) const;
  void PrefetchText(int64_t key) const;

  // Adds a copy of `text`, if the store contains no string for `key`. If the
  // store contains a different string, counts a collision, and keeps the first
  // string. Returns an error if `text` has 4 GiB or more.
  Status Add(int64_t key, std::string_view text);

  // Counts a lookup of the string `other`, whose key is the key of the stored
  // string `kept`.
  void CountCollision(std::string_view kept, std::string_view other);

  // Removes the string of `key`, if the store contains the key.
  void Remove(int64_t key);

  // Removes all strings and collisions.
  void Clear();

  // Returns the keys in the next `num_slots` slots of the hash table, or in all
  // slots if the table is smaller. Repeated calls visit all slots in turn, so
  // that a caller can remove strings in small steps.
  std::vector<int64_t> NextKeys(int64_t num_slots);

  // Returns all keys.
  std::vector<int64_t> Keys() const;

  int64_t size() const { return size_; }
  // Returns the sum of the lengths of all strings.
  int64_t num_bytes() const { return num_bytes_; }
  // Returns the number of lookups that `CountCollision` has counted.
  int64_t num_collisions() const { return num_collisions_; }
  // Returns the first different collisions, at most kMaxCollisions.
  const std::vector<Collision>& collisions() const { return collisions_; }

 private:
  // A slot is empty if `text` is null. Otherwise `text` is the length of the
  // string in 4 bytes, followed by the string.
  struct Slot {
    int64_t key = 0;
    std::unique_ptr<char[]> text;
  };

  static std::string_view TextOf(const Slot& slot);

  // Returns the slot of `key`, or the empty slot at which a search for the key
  // ends. The table must have an empty slot.
  size_t SlotOf(int64_t key) const;
  size_t HomeOf(int64_t key) const;
  void Grow();

  // The number of slots is 0 or a power of 2. Keys are found by linear probing.
  std::vector<Slot> slots_;
  size_t cursor_ = 0;
  int64_t size_ = 0;
  int64_t num_bytes_ = 0;
  int64_t num_collisions_ = 0;
  std::vector<Collision> collisions_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_STRING_STORE_H_
