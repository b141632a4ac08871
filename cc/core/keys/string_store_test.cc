#include "cc/core/keys/string_store.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// A hash with 8 values, so that most strings collide.
int64_t WeakHash(std::string_view text) {
  return text.empty() ? 0 : text.back() % 8;
}

TEST(StringStoreTest, AnEmptyStoreContainsNoKey) {
  StringStore store;
  std::string_view text;
  EXPECT_FALSE(store.Find(5, &text));
  EXPECT_TRUE(store.NextKeys(10).empty());
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
  std::vector<int64_t> keys = store.Keys();
  std::sort(keys.begin(), keys.end());
  std::vector<int64_t> expected_keys;
  std::string_view text;
  for (const auto& [key, value] : expected) {
    expected_keys.push_back(key);
    ASSERT_TRUE(store.Find(key, &text));
    EXPECT_EQ(text, value);
  }
  EXPECT_EQ(keys, expected_keys);
  for (int64_t key = -250; key < 250; ++key) {
    EXPECT_EQ(store.Find(key, &text), expected.count(key) == 1);
  }
  EXPECT_EQ(store.num_collisions(), 0);
}

TEST(StringStoreTest, NextKeysVisitsAllKeysInTurn) {
  StringStore store;
  for (int64_t key = 0; key < 100; ++key) {
    ASSERT_TRUE(store.Add(key, "x").ok());
  }
  std::vector<int64_t> keys;
  for (int i = 0; i < 256 / 8; ++i) {  // 100 strings take 256 slots.
    for (const int64_t key : store.NextKeys(8)) keys.push_back(key);
  }
  EXPECT_EQ(keys.size(), 100u);
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(std::unique(keys.begin(), keys.end()), keys.end());
  // A call visits each slot at most once.
  EXPECT_EQ(store.NextKeys(1 << 20).size(), 100u);
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
