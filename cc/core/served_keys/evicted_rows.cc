#include "cc/core/served_keys/evicted_rows.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/first_rows.h"

namespace layoutmap {
namespace {

template <typename T>
void Copy(const ShardedView<T>& view, Span<const int64_t> rows,
          EvictedBlock* block) {
  const int64_t size = view.dim * sizeof(T);
  std::vector<char>& values = block->values.emplace_back(rows.size() * size);
  char* next = values.data();
  for (const int64_t row : rows) {
    std::memcpy(next, view.row(row), size);
    next += size;
  }
  block->num_bytes += rows.size() * size;
}

}  // namespace

EvictedBlock CopyEvicted(std::vector<int64_t> keys, Span<const int64_t> at,
                         const FirstRows& rows) {
  EvictedBlock block;
  block.keys = std::move(keys);
  block.num_bytes = at.size() * sizeof(int64_t);
  if (rows.row_type == RowType::kFloat32) {
    Copy(rows.table, at, &block);
  } else {
    Copy(rows.half_table, at, &block);
  }
  for (const ShardedView<float>& slot : rows.slots) Copy(slot, at, &block);
  return block;
}

void EvictedRows::Add(std::list<EvictedBlock> blocks) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.splice(blocks_.end(), blocks);
}

int64_t EvictedRows::Read(int64_t reported, int64_t max_bytes,
                          EvictedBlock* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (first_ < reported && !blocks_.empty()) {
    blocks_.pop_front();
    ++first_;
  }
  *block = {};
  int64_t next = first_;
  for (const EvictedBlock& one : blocks_) {
    if (next > first_ && block->num_bytes >= max_bytes) break;
    block->keys.insert(block->keys.end(), one.keys.begin(), one.keys.end());
    block->values.resize(one.values.size());
    for (size_t v = 0; v < one.values.size(); ++v) {
      block->values[v].insert(block->values[v].end(), one.values[v].begin(),
                              one.values[v].end());
    }
    block->num_bytes += one.num_bytes;
    ++next;
  }
  return next;
}

}  // namespace layoutmap
