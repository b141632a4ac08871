#include "cc/core/collectives/arrivals.h"

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace layoutmap {

size_t ArrivalTable::KeyHash::operator()(const CollectiveKey& key) const {
  uint64_t hash = static_cast<uint32_t>(key.group);
  hash = hash << 32 | static_cast<uint32_t>(key.instance);
  hash ^=
      (key.frame + static_cast<uint64_t>(key.iteration)) * 0x9e3779b97f4a7c15u;
  hash *= 0xff51afd7ed558ccdu;
  return static_cast<size_t>(hash ^ (hash >> 32));
}

void ArrivalTable::TakeAll(Operation* operation, Arrivals* arrivals) {
  for (std::shared_ptr<Arrival>& arrival : operation->arrivals) {
    if (arrival == nullptr) continue;
    arrival->is_waiting_ = false;
    arrivals->push_back(std::move(arrival));
  }
}

ArrivalTable::Result ArrivalTable::Arrive(const CollectiveKey& key, int rank,
                                          int num_ranks,
                                          std::shared_ptr<Arrival> arrival) {
  assert(rank >= 0 && rank < num_ranks);
  Result result;
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_closed_ || arrival->is_withdrawn_) {
    result.outcome = is_closed_ ? Outcome::kClosed : Outcome::kWithdrawn;
    result.arrivals.push_back(std::move(arrival));
    return result;
  }
  const auto [it, is_first] = operations_.try_emplace(key);
  Operation& operation = it->second;
  if (is_first) operation.arrivals.resize(num_ranks);
  if (rank >= operation.arrivals.size() ||
      num_ranks != operation.arrivals.size() ||
      operation.arrivals[rank] != nullptr) {
    result.outcome = Outcome::kConflict;
    TakeAll(&operation, &result.arrivals);
    result.arrivals.push_back(std::move(arrival));
    operations_.erase(it);
    return result;
  }
  arrival->is_waiting_ = true;
  arrival->key_ = key;
  operation.arrivals[rank] = std::move(arrival);
  if (++operation.num_arrived < num_ranks) return result;
  result.outcome = Outcome::kComplete;
  result.arrivals.reserve(num_ranks);
  TakeAll(&operation, &result.arrivals);
  operations_.erase(it);
  return result;
}

Arrivals ArrivalTable::Withdraw(const std::shared_ptr<Arrival>& arrival) {
  Arrivals arrivals;
  std::lock_guard<std::mutex> lock(mutex_);
  arrival->is_withdrawn_ = true;
  if (!arrival->is_waiting_) return arrivals;
  const auto it = operations_.find(arrival->key_);
  assert(it != operations_.end());
  TakeAll(&it->second, &arrivals);
  operations_.erase(it);
  return arrivals;
}

Arrivals ArrivalTable::Close() {
  Arrivals arrivals;
  std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  for (auto& [key, operation] : operations_) TakeAll(&operation, &arrivals);
  operations_.clear();
  return arrivals;
}

}  // namespace layoutmap
