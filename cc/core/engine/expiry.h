// Reasons why a stored lookup or gradient cannot be used any more.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_EXPIRY_H_
#define TF_LAYOUTMAP_CORE_ENGINE_EXPIRY_H_

#include <cstdint>
#include <string>

namespace layoutmap {

enum class Expiry { kReset, kTooManyNewer, kOlderThanUpdate, kApplied };

// Returns the reason, and what to do. At most `max_open` lookups, and at most
// `max_open` gradients, are stored; an update discards everything that is more
// than `kept_behind` lookups older.
inline std::string ExpiryReason(Expiry expiry, int64_t max_open,
                                int64_t kept_behind) {
  switch (expiry) {
    case Expiry::kReset:
      return "the steps were reset, or a checkpoint was restored, after the "
             "lookup. Look the rows up again";
    case Expiry::kTooManyNewer:
      return std::to_string(max_open) +
             " newer lookups were made before its gradients arrived, or as "
             "many newer gradients before its update. Compute and apply the "
             "gradients of at most " +
             std::to_string(max_open) + " lookups at the same time";
    case Expiry::kOlderThanUpdate:
      return "an update of a lookup that is more than " +
             std::to_string(kept_behind) +
             " lookups newer came first. Apply gradients in the order of the "
             "lookups";
    case Expiry::kApplied:
      return "its update was already applied, and a later lookup, eviction, "
             "reset or restore may have assigned its rows to other keys. Apply "
             "the same gradients again before the next lookup, or look the "
             "rows up again";
  }
  return "";
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_EXPIRY_H_
