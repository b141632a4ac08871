// Steps that are identified by a token instead of by their order.
//
//   Open    ids -> token                 a lookup, possibly without later calls
//   Follow  token, gradients -> mark     the gradients of a lookup
//   Apply   sum of marks -> update       a step of an optimizer
//
// A lookup does not require later calls; the oldest open lookups are discarded.
// The marks determine which gradients are applied. A mark is returned as the
// gradient of a weight. If gradients are summed, averaged or scaled, the same
// operations are applied to their marks, and each gradient is multiplied by the
// resulting factor of its mark. A skipped step has no mark in the sum, and its
// gradients are discarded later.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_TOKEN_STEPS_H_
#define TF_LAYOUTMAP_CORE_ENGINE_TOKEN_STEPS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

class TokenSteps {
 public:
  // Maximum number of open lookups per replica, and of gradients that wait for
  // an update.
  static constexpr int64_t kMaxOpen = 64;
  // An update discards lookups and gradients that are at least this many
  // lookups older.
  static constexpr int64_t kKeptBehind = 8;

  // For each place of a waiting gradient: a factor, and the factor multiplied
  // by the generation of the place. Their quotient identifies the gradient.
  static constexpr int64_t kMarkSize = 2 * kMaxOpen;
  using Mark = std::array<float, kMarkSize>;

  // Lookups and updates are counted in `engine`, which must outlive this
  // object.
  explicit TokenSteps(HostEngine* engine);

  // Stores a checked batch. Its token is larger than all earlier tokens.
  Status Open(int32_t replica, std::shared_ptr<const Batch> batch,
              int64_t* token);

  // Takes back the newest lookup of a replica, as if it had not been opened.
  // Returns an error if a newer lookup was opened, or if an update has
  // discarded this lookup.
  Status TakeBack(int32_t replica, int64_t token);

  Status Find(int32_t replica, int64_t token,
              std::shared_ptr<const Batch>* batch) const;

  // Stores gradients of a lookup. A lookup may have several gradients, each
  // with a separate mark.
  Status Follow(int32_t replica, int64_t token, BatchGradients gradients,
                Mark* mark);

  // Receives the sum of marks of one replica. The call of the last replica sets
  // `update` to the update of all replicas, or to null if there are no marks.
  // The caller must call `Prepare`, run the update, and then call
  // `FinishApply`. If the update failed, the replica may apply again.
  Status BeginApply(int32_t replica, Span<const float> marks,
                    std::vector<std::vector<float>> hyperparameters,
                    std::shared_ptr<HostEngine::Step>* update);
  // Scales the gradients and finds the unique rows.
  void Prepare(HostEngine::Step* update, const ParallelFor& parallel_for) const;
  void FinishApply(int32_t replica, const HostEngine::Step& update,
                   bool updated);

  // Calls `visit(batch)` for the batches of all stored lookups, and of running
  // calls whose lookup was discarded by a reset.
  void VisitInFlight(const std::function<void(const Batch&)>& visit) const;

  // Discards all lookups and gradients. Tokens continue to increase.
  void Reset();

  // Returns whether an update runs or waits for other replicas.
  bool IsApplying() const;

  // Return the number of open lookups and of waiting gradients, by replica.
  std::vector<int64_t> NumOpen() const;
  std::vector<int64_t> NumFollowed() const;

 private:
  struct Followed {
    int64_t token = 0;
    std::shared_ptr<const Batch> batch;
    BatchGradients gradients;
  };
  struct Replica {
    int64_t next_token = 1;
    int64_t next_followed = 0;
    std::map<int64_t, std::shared_ptr<const Batch>> open;  // by token
    std::map<int64_t, Followed> followed;                  // by number
    // Numbers and factors of the update that waits for other replicas.
    bool is_applying = false;
    std::vector<std::pair<int64_t, float>> applying;
  };

  Status CheckReplica(int32_t replica) const;
  Status FindLocked(int32_t replica, int64_t token,
                    std::shared_ptr<const Batch>* batch) const;
  Status ReadMarks(int32_t replica, Span<const float> marks,
                   std::vector<std::pair<int64_t, float>>* applying) const;
  Status Fail(int32_t replica, Status status);
  std::string TableNames() const;
  std::shared_ptr<HostEngine::Step> MakeUpdate() const;
  void EndRound();

  HostEngine* const engine_;
  mutable std::mutex mutex_;  // guards the members below
  std::vector<Replica> replicas_;
  bool is_updating_ = false;
  mutable BatchesInUse in_use_;  // batches returned by `Find`
  std::string error_;  // reason why the replicas have no common step, or empty
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_TOKEN_STEPS_H_
