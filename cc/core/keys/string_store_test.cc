#include "cc/core/keys/string_store.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Returns the value whose `MixBits` is `mixed`.
int64_t KeyOfHash(uint64_t mixed) {
  // Each line inverts one line of MixBits. The factors are the inverses of its
  // factors modulo 2^64.
  uint64_t x = mixed ^ (mixed >> 31) ^ (mixed >> 62);
  x *= 0x319642B2D24D8EC3u;
  x ^= (x >> 27) ^ (x >> 54);
  x *= 0x96DE1B173F119089u;
  x ^= (x >> 30) ^ (x >> 60);
  return static_cast<int64_t>(x);
}

// Records the keys, and selects some of them.
StringStore::Select Recording(std::vector<int64_t>* visited,
                              const std::set<int64_t>& selected = {}) {
  return [visited, selected](Span<const int64_t> keys, Span<bool> out) {
    for (int64_t i = 0; i < keys.size(); ++i) {
      visited->push_back(keys[i]);
      out[i] = selected.count(keys[i]) > 0;
    }
  };
}

std::vector<int64_t> SortedKeys(StringStore* store) {
  std::vector<int64_t> keys;
  store->RemoveAll(Recording(&keys));
  std::sort(keys.begin(), keys.end());
  return keys;
}

// A hash with 8 values, so that most strings collide.
int64_t WeakHash(std::string_view text) {
  return text.empty() ? 0 : text.back() % 8;
}

TEST(StringStoreTest, AnEmptyStoreContainsNoKey) {
  StringStore store;
  std::string_view text;
  EXPECT_FALSE(store.Find(5, &text));
  std::vector<int64_t> visited;
  store.RemoveNext(10, Recording(&visited));
  store.RemoveAll(Recording(&visited));
  EXPECT_TRUE(visited.empty());
  store.FindAll(
      std::vector<int64_t>{5, 6},
      [](int64_t, const std::string_view* kept) { EXPECT_EQ(kept, nullptr); });
  store.PrefetchSlot(5);
  store.Remove(5);
  EXPECT_EQ(store.size(), 0);
}

TEST(StringStoreTest, AnEmptyStringAndZeroBytesAreStrings) {
  StringStore store;
  const std::string zeros("a\0b", 3);
  ASSERT_TRUE(store.Add(0, "").ok());
  ASSERT_TRUE(store.Add(-1, zeros).ok());
  std::string_view text = "other";
  EXPECT_TRUE(store.Find(0, &text));
  EXPECT_EQ(text, "");
  EXPECT_TRUE(store.Find(-1, &text));
  EXPECT_EQ(text, zeros);
  EXPECT_EQ(store.num_bytes(), 3);
}

TEST(StringStoreTest, ChangesMatchAMapOfTheStandardLibrary) {
  std::mt19937_64 random(7);
  StringStore store;
  std::map<int64_t, std::string> expected;
  int64_t num_bytes = 0;
  for (int i = 0; i < 20000; ++i) {
    // Keys from a small range are added and removed again and again.
    const auto key = static_cast<int64_t>(random() % 500) - 250;
    if (random() % 3 == 0) {
      const auto found = expected.find(key);
      if (found != expected.end()) {
        num_bytes -= static_cast<int64_t>(found->second.size());
        expected.erase(found);
      }
      store.Remove(key);
    } else {
      const std::string text = std::to_string(key * 1000003);
      if (expected.emplace(key, text).second) {
        num_bytes += static_cast<int64_t>(text.size());
      }
      ASSERT_TRUE(store.Add(key, text).ok());
    }
    ASSERT_EQ(store.size(), static_cast<int64_t>(expected.size()));
    ASSERT_EQ(store.num_bytes(), num_bytes);
  }
  std::vector<int64_t> expected_keys;
  std::string_view text;
  for (const auto& [key, value] : expected) {
    expected_keys.push_back(key);
    ASSERT_TRUE(store.Find(key, &text));
    EXPECT_EQ(text, value);
  }
  EXPECT_EQ(SortedKeys(&store), expected_keys);
  for (int64_t key = -250; key < 250; ++key) {
    EXPECT_EQ(store.Find(key, &text), expected.count(key) == 1);
  }
  EXPECT_EQ(store.num_collisions(), 0);
}

TEST(StringStoreTest, FindAllReturnsTheStringOfEachKey) {
  StringStore store;
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 1000; ++key) {
    keys.push_back(key % 300);
    if (key % 3 != 0) continue;
    ASSERT_TRUE(store.Add(key, "text " + std::to_string(key)).ok());
  }
  int64_t next = 0;
  store.FindAll(keys, [&](int64_t i, const std::string_view* kept) {
    EXPECT_EQ(i, next++);
    std::string_view text;
    ASSERT_EQ(kept != nullptr, store.Find(keys[i], &text));
    if (kept != nullptr) {
      EXPECT_EQ(*kept, text);
    }
  });
  EXPECT_EQ(next, 1000);
}

TEST(StringStoreTest, KeysWithTheSameFirstSlotAreFound) {
  StringStore store;
  constexpr int64_t kNumKeys = 700;
  const auto key_of = [](int64_t i) {
    return KeyOfHash(0xABCD000000000005u | static_cast<uint64_t>(i) << 30);
  };
  ASSERT_EQ(MixBits(static_cast<uint64_t>(key_of(3))), 0xABCD0000C0000005u);
  for (int64_t i = 0; i < kNumKeys; ++i) {
    ASSERT_TRUE(store.Add(key_of(i), std::to_string(i)).ok());
  }
  // The first slots of the other keys are in the same run of slots.
  const auto other_of = [](int64_t i) {
    return KeyOfHash(0xABCC000000000000u | static_cast<uint64_t>(i));
  };
  for (int64_t i = 0; i < kNumKeys; i += 10) {
    ASSERT_TRUE(store.Add(other_of(i), "other " + std::to_string(i)).ok());
  }
  const auto expect_strings = [&](int64_t first) {
    std::string_view text;
    for (int64_t i = 0; i < kNumKeys; ++i) {
      const bool is_kept = i % 3 != 0 || i >= first;
      ASSERT_EQ(store.Find(key_of(i), &text), is_kept);
      if (is_kept) {
        ASSERT_EQ(text, std::to_string(i));
      }
      ASSERT_EQ(store.Find(other_of(i), &text), i % 10 == 0);
      if (i % 10 == 0) {
        ASSERT_EQ(text, "other " + std::to_string(i));
      }
    }
    ASSERT_FALSE(store.Find(key_of(kNumKeys), &text));
  };
  expect_strings(0);
  for (int64_t i = 0; i < kNumKeys; i += 3) {
    store.Remove(key_of(i));
    if (i % 60 == 0) expect_strings(i + 1);
  }
  expect_strings(kNumKeys);
  EXPECT_EQ(store.num_collisions(), 0);
}

TEST(StringStoreTest, AddReturnsTheStringThatTheStoreContains) {
  StringStore store;
  std::string_view kept;
  ASSERT_TRUE(store.Add(1, "first", &kept).ok());
  EXPECT_EQ(kept, "first");
  ASSERT_TRUE(store.Add(1, "second", &kept).ok());
  EXPECT_EQ(kept, "first");
  EXPECT_EQ(store.size(), 1);
  EXPECT_EQ(store.num_collisions(), 0);
}

TEST(StringStoreTest, RemoveNextVisitsAllKeysInTurn) {
  StringStore store;
  for (int64_t key = 0; key < 100; ++key) {
    ASSERT_TRUE(store.Add(key, "x").ok());
  }
  std::vector<int64_t> keys;
  for (int i = 0; i < 256 / 8; ++i) {  // 100 strings take 256 slots.
    store.RemoveNext(8, Recording(&keys));
  }
  EXPECT_EQ(keys.size(), 100u);
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(std::unique(keys.begin(), keys.end()), keys.end());
  // A call visits each slot at most once.
  keys.clear();
  store.RemoveNext(1 << 20, Recording(&keys));
  EXPECT_EQ(keys.size(), 100u);
}

TEST(StringStoreTest, OnlySelectedKeysOfVisitedSlotsAreRemoved) {
  constexpr int64_t kNumKeys = 5000;
  StringStore store;
  for (int64_t key = 0; key < kNumKeys; ++key) {
    ASSERT_TRUE(store.Add(key, std::to_string(key)).ok());
  }
  std::set<int64_t> left, visited;
  for (int64_t key = 0; key < kNumKeys; ++key) left.insert(key);
  const StringStore::Select select = [&](Span<const int64_t> keys,
                                         Span<bool> is_selected) {
    for (int64_t i = 0; i < keys.size(); ++i) {
      visited.insert(keys[i]);
      is_selected[i] = keys[i] % 3 == 0;
      if (is_selected[i]) left.erase(keys[i]);
    }
  };
  const auto expect_left = [&] {
    std::string_view text;
    ASSERT_EQ(store.size(), static_cast<int64_t>(left.size()));
    for (int64_t key = 0; key < kNumKeys; ++key) {
      const bool is_left = left.count(key) == 1;
      ASSERT_EQ(store.Find(key, &text), is_left);
      if (is_left) {
        ASSERT_EQ(text, std::to_string(key));
      }
    }
  };
  store.RemoveNext(3000, select);
  expect_left();
  store.RemoveNext(1500, select);
  expect_left();
  // 5000 strings take 8192 slots.
  EXPECT_GT(visited.size(), 2000u);
  EXPECT_LT(visited.size(), 3500u);
  store.RemoveAll(select);
  expect_left();
  EXPECT_EQ(store.size(), kNumKeys - (kNumKeys + 2) / 3);
}

TEST(StringStoreTest, AStringOf16MiBIsFreed) {
  // A slot cannot store the length of the string.
  StringStore store;
  const std::string large(size_t{1} << 24, 'l');
  const std::string smaller(large.size() - 2, 's');
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(store.Add(1, large).ok());
    ASSERT_TRUE(store.Add(2, smaller).ok());
    std::string_view text;
    ASSERT_TRUE(store.Find(1, &text));
    EXPECT_EQ(text, large);
    ASSERT_TRUE(store.Find(2, &text));
    EXPECT_EQ(text, smaller);
    EXPECT_EQ(store.num_bytes(), (1 << 25) - 2);
    EXPECT_LT(store.num_memory_bytes(), (1 << 25) + 1000);
    store.Remove(1);
    EXPECT_LT(store.num_memory_bytes(), (1 << 24) + 1000);
    store.Remove(2);
    EXPECT_EQ(store.num_bytes(), 0);
    EXPECT_LT(store.num_memory_bytes(), 1000);
  }
}

TEST(StringStoreTest, AStreamOfNewStringsNeedsBoundedMemory) {
  // In each round, the strings of the preceding round are removed. Their
  // lengths change, so that their memory cannot be reused.
  StringStore store;
  constexpr int64_t kKeysPerRound = 2000;
  constexpr int64_t kNumSlots = 8192;
  std::string_view text;
  const auto text_of = [](int64_t key) {
    const auto length = static_cast<size_t>(20 + key / kKeysPerRound * 16);
    return std::string(length, static_cast<char>('a' + key % 26));
  };
  for (int64_t round = 0; round < 60; ++round) {
    const int64_t first = round * kKeysPerRound;
    for (int64_t i = 0; i < kKeysPerRound; ++i) {
      ASSERT_TRUE(store.Add(first + i, text_of(first + i)).ok());
      store.Remove(first + i - kKeysPerRound);
    }
    ASSERT_EQ(store.size(), kKeysPerRound);
    for (int64_t key = first; key < first + kKeysPerRound; ++key) {
      ASSERT_TRUE(store.Find(key, &text));
      ASSERT_EQ(text, text_of(key));
    }
    // The strings take at most half of the memory, except for 1 MiB and a new
    // block of 2 MiB.
    EXPECT_LE(store.num_memory_bytes(),
              kNumSlots * 8 + 2 * (store.num_bytes() + 40 * kKeysPerRound) +
                  (3 << 20));
  }
  for (int64_t key = 59 * kKeysPerRound; key < 60 * kKeysPerRound; ++key) {
    store.Remove(key);
  }
  EXPECT_EQ(store.num_bytes(), 0);
  EXPECT_LE(store.num_memory_bytes(), kNumSlots * 8 + (1 << 20));
}

TEST(StringStoreTest, TheFirstOfTwoStringsWithTheSameKeyIsKept) {
  StringStore store;
  for (const char* text : {"ant", "bat", "ant", "cot", "bat", "dog"}) {
    ASSERT_TRUE(store.Add(WeakHash(text), text).ok());
  }
  std::string_view text;
  ASSERT_TRUE(store.Find(WeakHash("bat"), &text));
  EXPECT_EQ(text, "ant");
  EXPECT_EQ(store.size(), 2);
  // "bat" occurs twice, and is recorded once.
  EXPECT_EQ(store.num_collisions(), 3);
  ASSERT_EQ(store.collisions().size(), 2u);
  EXPECT_EQ(store.collisions()[0].kept, "ant");
  EXPECT_EQ(store.collisions()[0].other, "bat");
  EXPECT_EQ(store.collisions()[1].other, "cot");
  store.Clear();
  EXPECT_EQ(store.num_collisions(), 0);
  EXPECT_EQ(store.size(), 0);
}

TEST(StringStoreTest, TheNumberOfRecordedCollisionsIsLimited) {
  StringStore store;
  ASSERT_TRUE(store.Add(1, "first").ok());
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(store.Add(1, std::to_string(i)).ok());
  }
  EXPECT_EQ(store.num_collisions(), 100);
  EXPECT_EQ(static_cast<int64_t>(store.collisions().size()),
            StringStore::kMaxCollisions);
}

}  // namespace
}  // namespace layoutmap
