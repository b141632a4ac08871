#include "cc/core/keys/merged_keys.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "cc/core/base/views.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Keys = std::vector<int64_t>;

// Returns the keys of each table, read through the merged keys.
std::vector<Keys> ReadBack(const MergedKeys& merged,
                           const std::vector<Keys>& tables) {
  std::vector<Keys> found;
  for (size_t t = 0; t < tables.size(); ++t) {
    Keys keys;
    for (size_t i = 0; i < tables[t].size(); ++i) {
      const bool is_prefix = merged.places[t].size() == 0;
      keys.push_back(merged.keys[is_prefix ? i : merged.places[t][i]]);
    }
    found.push_back(keys);
  }
  return found;
}

MergedKeys Merge(const std::vector<Keys>& tables) {
  return MergeKeys({tables.begin(), tables.end()});
}

TEST(MergedKeysTest, EqualTablesAreCountedOnce) {
  const std::vector<Keys> tables = {{5, 7, 5}, {5, 7, 5}, {5, 7, 5}};
  const MergedKeys merged = Merge(tables);
  EXPECT_EQ(merged.keys, tables[0]);
  EXPECT_EQ(ReadBack(merged, tables), tables);
}

TEST(MergedKeysTest, OtherTablesAddOnlyFurtherOccurrences) {
  const std::vector<Keys> tables = {{5, 7, 5}, {7, 9, 7, 5}, {5, 5, 5, -1}};
  const MergedKeys merged = Merge(tables);
  EXPECT_EQ(merged.keys, (Keys{5, 7, 5, 9, 7, 5, -1}));
  EXPECT_EQ(ReadBack(merged, tables), tables);
}

TEST(MergedKeysTest, TablesCanBeEmpty) {
  EXPECT_EQ(Merge({}).keys, Keys{});
  EXPECT_EQ(Merge({{}, {}}).keys, Keys{});
  EXPECT_EQ(Merge({{}, {3, 3}}).keys, (Keys{3, 3}));
  EXPECT_EQ(Merge({{3}, {}}).keys, Keys{3});
}

TEST(MergedKeysTest, EachKeyOccursAsOftenAsInTheTableWithMostOccurrences) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Keys> tables(1 + random() % 4);
    std::map<int64_t, int64_t> expected;
    for (Keys& table : tables) {
      std::map<int64_t, int64_t> here;
      table.resize(random() % 20);
      for (int64_t& key : table) {
        key = static_cast<int64_t>(random() % 8) - 3;
        expected[key] = std::max(expected[key], ++here[key]);
      }
    }
    const MergedKeys merged = Merge(tables);
    std::map<int64_t, int64_t> counted;
    for (const int64_t key : merged.keys) ++counted[key];
    EXPECT_EQ(counted, expected);
    EXPECT_EQ(ReadBack(merged, tables), tables);
  }
}

}  // namespace
}  // namespace layoutmap
