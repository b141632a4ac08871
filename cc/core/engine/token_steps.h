// Stores steps that are identified by a token. The steps of HostEngine are
// identified by their order instead.
//
//   Open    ids -> token                 a lookup, possibly without later calls
//   Follow  token, gradients -> mark     the gradients of a lookup
//   Apply   sum of marks -> update       a step of an optimizer
//
// A program may call `Open` without calling `Follow` or `Apply` later. The
// oldest open lookups are discarded. `Apply` applies the gradients whose marks
// are in the sum. The caller returns a mark as the gradient of a weight. If a
// program sums, averages or scales gradients, it applies the same operations to
// the marks. `Apply` then multiplies each gradient by the resulting factor of
// its mark, and returns an error if the program applied other operations; see
// marks.h. If a program skips a step, the sum contains no mark of that step,
// and the gradients of the step are discarded later. A step whose sum was
// multiplied by 0 is applied with gradients of zeros.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_TOKEN_STEPS_H_
#define TF_LAYOUTMAP_CORE_ENGINE_TOKEN_STEPS_H_

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
#include "cc/core/engine/expiry.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/marks.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

class TokenSteps {
 public:
  // Maximum number of open lookups per replica, and maximum number of gradients
  // per replica that wait for an update.
  static constexpr int64_t kMaxOpen = kMarkRows;
  // An update of a lookup discards all lookups that are more than `kKeptBehind`
  // lookups older, and their gradients.
  static constexpr int64_t kKeptBehind = 8;

  // The lookups and updates are added to the counts of `engine`, which must
  // outlive this object.
  explicit TokenSteps(HostEngine* engine);

  // Stores a checked batch and returns its token, which is larger than all
  // earlier tokens.
  Status Open(int32_t replica, std::shared_ptr<const Batch> batch,
              int64_t* token);

  // Removes the newest lookup of a replica, as if it had not been opened.
  // Returns an error if a newer lookup was opened, or if an update has
  // discarded this lookup.
  Status TakeBack(int32_t replica, int64_t token);

  Status Find(int32_t replica, int64_t token,
              std::shared_ptr<const Batch>* batch) const;

  // Stores gradients of a lookup, also if the lookup was applied and can be
  // applied again. A lookup may have several gradients, each with a separate
  // mark. `coordinates` is empty, or contains the coordinates of the gradients
  // relative to the preceding gradients of the lookup, if the caller has
  // computed them from a larger batch.
  Status Follow(int32_t replica, int64_t token, BatchGradients gradients,
                Span<const float> coordinates, const ParallelFor& parallel_for,
                Mark* mark);

  // Receives the sum of marks of one replica, which consists of one mark for
  // each replica. The marks of other replicas are not zero if the program sums
  // or averages gradients over replicas. `*update` must be null. The call
  // of the last replica sets `*update` to the update of all replicas, unless no
  // replica has marks. All other calls leave `*update` null. If `*update` is
  // not null, the caller must call `Prepare`, run the update, and then call
  // `FinishApply`. If the update fails, the replica may call `BeginApply`
  // again.
  Status BeginApply(int32_t replica, Span<const float> marks,
                    std::vector<std::vector<float>> hyperparameters,
                    std::shared_ptr<HostEngine::Step>* update);
  // Scales the gradients of an update by their factors, and finds the unique
  // rows.
  void Prepare(HostEngine::Step* update, const ParallelFor& parallel_for) const;
  void FinishApply(int32_t replica, const HostEngine::Step& update,
                   bool updated);

  // Calls `visit(batch)` for the batches of all stored lookups. Also visits
  // batches that a running call still uses after a reset discarded their
  // lookup. The caller may assign all other rows to other keys. Applied lookups
  // and gradients are therefore discarded, except for the gradients of an
  // update that is running or waits for other replicas.
  void VisitInFlight(const std::function<void(const Batch&)>& visit) const;

  // Discards all lookups and gradients. Later tokens are larger than all
  // earlier tokens.
  void Reset();

  // Returns whether an update is running or waits for other replicas.
  bool IsApplying() const;

  // For each replica, these functions return the number of open lookups, and
  // the number of gradients that wait for an update.
  std::vector<int64_t> NumOpen() const;
  std::vector<int64_t> NumFollowed() const;

 private:
  struct Followed {
    int64_t token = 0;
    std::shared_ptr<const Batch> batch;
    BatchGradients gradients;
    Mark mark;
  };
  // The factor of the gradients `number` of a replica.
  struct Factor {
    int32_t replica = 0;
    int64_t number = 0;
    float factor = 0;
  };
  struct Replica {
    int64_t next_token = 1;
    int64_t next_followed = 0;
    // The open lookups, by token.
    std::map<int64_t, std::shared_ptr<const Batch>> open;
    // The gradients that wait for an update, by number.
    std::map<int64_t, Followed> followed;
    // Lookups and gradients that were applied since the newest lookup. They can
    // be applied again until `VisitInFlight` or `Open` discards them.
    std::map<int64_t, std::shared_ptr<const Batch>> applied_open;
    std::map<int64_t, Followed> applied;
    // The token of the newest lookup whose gradients were applied.
    int64_t last_applied = 0;
    // Older lookups were discarded because of a reset, because there were too
    // many newer lookups, or because of an update.
    int64_t first_after_reset = 0;
    int64_t first_of_newest = 0;
    int64_t first_after_update = 0;
    // If `is_applying` is true, the gradients in the sum that this replica
    // passed. Their update waits for other replicas.
    bool is_applying = false;
    std::vector<Factor> applying;
  };

  Status CheckReplica(int32_t replica) const;
  Status FindLocked(int32_t replica, int64_t token,
                    std::shared_ptr<const Batch>* batch) const;
  // Returns why a lookup is not open any more.
  static Expiry WhyExpired(const Replica& r, int64_t token);
  Status ReadSum(int32_t replica, Span<const float> marks,
                 std::vector<Factor>* applying) const;
  std::vector<std::vector<Factor>> FactorsByReplica() const;
  // Returns gradients that wait for an update or can be applied again, or null.
  static const Followed* FindFollowed(const Replica& r, int64_t number);
  Status Fail(int32_t replica, Status status);
  std::string TableNames() const;
  std::shared_ptr<HostEngine::Step> MakeUpdate() const;
  void EndRound();
  // Discards applied lookups and gradients, except for the gradients of an
  // update that is running or waits for other replicas.
  void DiscardApplied() const;

  HostEngine* const engine_;
  // Guards the members below.
  mutable std::mutex mutex_;
  mutable std::vector<Replica> replicas_;
  bool is_updating_ = false;
  // The batches that `Find` returned and that are still in use.
  mutable BatchesInUse in_use_;
  // Describes why a step failed in one replica. Empty if no step failed.
  std::string error_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_TOKEN_STEPS_H_
