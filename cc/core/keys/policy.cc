#include "cc/core/keys/policy.h"

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {

using std::to_string;

Status ParseAdmission(const std::string& name, Admission* admission) {
  if (name == "all") {
    *admission = Admission::kAll;
  } else if (name == "count") {
    *admission = Admission::kCount;
  } else if (name == "probability") {
    *admission = Admission::kProbability;
  } else {
    return InvalidArgument(
        "`admission` must be one of all, count, probability. Received: " +
        name);
  }
  return Status();
}

Status ParseEviction(const std::string& name, Eviction* eviction) {
  if (name == "none") {
    *eviction = Eviction::kNone;
  } else if (name == "lru") {
    *eviction = Eviction::kLru;
  } else if (name == "lfu") {
    *eviction = Eviction::kLfu;
  } else {
    return InvalidArgument("`evict` must be one of none, lru, lfu. Received: " +
                           name);
  }
  return Status();
}

Status CheckPolicy(const VocabularyPolicy& policy) {
  if (policy.min_count < 1 || policy.min_count > 255) {
    return InvalidArgument("`min_count` must be in [1, 255]. Received: " +
                           to_string(policy.min_count));
  }
  if (policy.admitted_of_2_32 < 0 ||
      policy.admitted_of_2_32 > (int64_t{1} << 32)) {
    return InvalidArgument("`probability` must be in [0, 1]. Received: " +
                           to_string(policy.admitted_of_2_32) + " of 2^32");
  }
  if (policy.half_life_steps < 0 || policy.ttl_steps < 0) {
    return InvalidArgument(
        "`half_life_steps` and `ttl_steps` must be at least 0. Received: " +
        to_string(policy.half_life_steps) + ", " + to_string(policy.ttl_steps));
  }
  return Status();
}

}  // namespace layoutmap
