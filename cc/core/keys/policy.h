// Admission and eviction policies of open vocabularies.

#ifndef TF_LAYOUTMAP_CORE_KEYS_POLICY_H_
#define TF_LAYOUTMAP_CORE_KEYS_POLICY_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/keys/bucket_layout.h"

namespace layoutmap {

enum class Admission {
  kAll,
  // A key is admitted after a sketch has counted `min_count` uses.
  kCount,
  // In each step that uses the key, it is admitted with a fixed probability.
  kProbability,
};

enum class Eviction {
  kNone,
  // The least recently used key is evicted.
  kLru,
  // The least frequently used key is evicted. The counts decay with age.
  kLfu,
};

Status ParseAdmission(const std::string& name, Admission* admission);
Status ParseEviction(const std::string& name, Eviction* eviction);

struct VocabularyPolicy {
  Admission admission = Admission::kAll;
  // In [1, 255].
  int32_t min_count = 1;
  // Admission probability per step, multiplied by 2^32.
  int64_t admitted_of_2_32 = int64_t{1} << 32;
  Eviction eviction = Eviction::kLru;
  // Number of steps after which the count of an unused key is halved. If 0,
  // counts are never halved.
  int32_t half_life_steps = 0;
  // A key expires if it was not used for more than this number of steps.
  // Expired keys are evicted before other keys. If 0, keys do not expire.
  int32_t ttl_steps = 0;
  // Whether a step fails if no row is free for an admitted key. A step that
  // fails inserts no keys.
  bool fails_when_full = false;
  // Seed for the admission with a probability.
  uint64_t seed = 0;
};

Status CheckPolicy(const VocabularyPolicy& policy);

// Returns the count of a key after decay. `age` is the number of steps since
// the last use of the key.
inline int32_t DecayedCount(const VocabularyPolicy& policy, int32_t count,
                            int64_t age) {
  if (policy.half_life_steps <= 0 || age <= 0) return count;
  return count >> std::min<int64_t>(age / policy.half_life_steps, 31);
}

// Returns the score of a key. The key with the lowest score is evicted first.
// If several keys have this score, the key with the lowest row is evicted.
inline int32_t ScoreOf(const VocabularyPolicy& policy, int32_t last_step,
                       int32_t count, int32_t step) {
  if (policy.eviction == Eviction::kLru) return last_step;
  return DecayedCount(policy, count, int64_t{step} - last_step);
}

inline bool IsExpired(const VocabularyPolicy& policy, int32_t last_step,
                      int32_t step) {
  return policy.ttl_steps > 0 && int64_t{step} - last_step > policy.ttl_steps;
}

// Returns whether a key is admitted if the admission policy is kProbability.
// The result depends only on the seed, the key and the step.
inline bool IsAdmittedByChance(const VocabularyPolicy& policy, int64_t key,
                               int32_t step) {
  const uint64_t bits =
      MixBits(MixBits(MixBits(policy.seed) ^ static_cast<uint64_t>(key)) +
              static_cast<uint32_t>(step));
  return static_cast<int64_t>(bits >> 32) < policy.admitted_of_2_32;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_POLICY_H_
