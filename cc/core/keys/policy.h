// Which keys get a row, and which give theirs away.

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
  kCount,        // once a sketch has counted it `min_count` times
  kProbability,  // by chance, anew in each step that has it
};

enum class Eviction {
  kNone,
  kLru,  // the key that was used last longest ago
  kLfu,  // the key that was used least, counts halved with age
};

Status ParseAdmission(const std::string& name, Admission* admission);
Status ParseEviction(const std::string& name, Eviction* eviction);

struct VocabularyPolicy {
  Admission admission = Admission::kAll;
  int32_t min_count = 1;  // in [1, 255]
  // Of 2^32: how often a key is admitted by chance.
  int64_t admitted_of_2_32 = int64_t{1} << 32;
  Eviction eviction = Eviction::kLru;
  int32_t half_life_steps = 0;  // of counts; 0: they are never halved
  // A key that was not used for more steps gives its row away before any other;
  // 0: keys do not expire.
  int32_t ttl_steps = 0;
  // Whether a key that finds no place is an error, and none is then inserted.
  bool fails_when_full = false;
  uint64_t seed = 0;  // of chance
};

Status CheckPolicy(const VocabularyPolicy& policy);

// How often a key counts as used after so many steps without a use.
inline int32_t DecayedCount(const VocabularyPolicy& policy, int32_t count,
                            int64_t age) {
  if (policy.half_life_steps <= 0 || age <= 0) return count;
  return count >> std::min<int64_t>(age / policy.half_life_steps, 31);
}

// The lowest gives its row away first; of equal ones, the lowest row.
inline int32_t ScoreOf(const VocabularyPolicy& policy, int32_t last_step,
                       int32_t count, int32_t step) {
  if (policy.eviction == Eviction::kLru) return last_step;
  return DecayedCount(policy, count, int64_t{step} - last_step);
}

inline bool IsExpired(const VocabularyPolicy& policy, int32_t last_step,
                      int32_t step) {
  return policy.ttl_steps > 0 && int64_t{step} - last_step > policy.ttl_steps;
}

// A function of seed, key and step alone.
inline bool IsAdmittedByChance(const VocabularyPolicy& policy, int64_t key,
                               int32_t step) {
  const uint64_t bits =
      MixBits(MixBits(MixBits(policy.seed) ^ static_cast<uint64_t>(key)) +
              static_cast<uint32_t>(step));
  return static_cast<int64_t>(bits >> 32) < policy.admitted_of_2_32;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_POLICY_H_
