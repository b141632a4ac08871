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
  kCount,        // admits a key after a sketch has counted it `min_count` times
  kProbability,  // admits a key at random in each step that uses the key
};

enum class Eviction {
  kNone,
  kLru,  // evicts the least recently used key
  kLfu,  // evicts the least frequently used key; counts decay with age
};

Status ParseAdmission(const std::string& name, Admission* admission);
Status ParseEviction(const std::string& name, Eviction* eviction);

struct VocabularyPolicy {
  Admission admission = Admission::kAll;
  int32_t min_count = 1;  // in [1, 255]
  // Admission probability of a key, multiplied by 2^32.
  int64_t admitted_of_2_32 = int64_t{1} << 32;
  Eviction eviction = Eviction::kLru;
  int32_t half_life_steps = 0;  // steps until a count is halved; 0: never
  // A key that was not used for more than this number of steps is evicted
  // before any other key; 0: keys do not expire.
  int32_t ttl_steps = 0;
  // Whether a key without a free row is an error. No key is then inserted.
  bool fails_when_full = false;
  uint64_t seed = 0;  // seed of random admission
};

Status CheckPolicy(const VocabularyPolicy& policy);

// Returns the decayed count of a key that was not used for `age` steps.
inline int32_t DecayedCount(const VocabularyPolicy& policy, int32_t count,
                            int64_t age) {
  if (policy.half_life_steps <= 0 || age <= 0) return count;
  return count >> std::min<int64_t>(age / policy.half_life_steps, 31);
}

// Returns the score of a key. The key with the lowest score is evicted first;
// among equal scores, the key with the lowest row.
inline int32_t ScoreOf(const VocabularyPolicy& policy, int32_t last_step,
                       int32_t count, int32_t step) {
  if (policy.eviction == Eviction::kLru) return last_step;
  return DecayedCount(policy, count, int64_t{step} - last_step);
}

inline bool IsExpired(const VocabularyPolicy& policy, int32_t last_step,
                      int32_t step) {
  return policy.ttl_steps > 0 && int64_t{step} - last_step > policy.ttl_steps;
}

// Returns whether a key is admitted at random. The result only depends on seed,
// key and step.
inline bool IsAdmittedByChance(const VocabularyPolicy& policy, int64_t key,
                               int32_t step) {
  const uint64_t bits =
      MixBits(MixBits(MixBits(policy.seed) ^ static_cast<uint64_t>(key)) +
              static_cast<uint32_t>(step));
  return static_cast<int64_t>(bits >> 32) < policy.admitted_of_2_32;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_POLICY_H_
