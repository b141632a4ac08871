// Steps that are found by a token instead of by their order.
//
//   Open    ids -> token                 a lookup, which may stay the only call
//   Follow  token, gradients -> mark     its gradients, if somebody takes them
//   Apply   sum of marks -> update       when an optimizer takes its step
//
// Nothing has to follow a lookup: of the open ones the oldest are dropped. What
// is applied is said by the marks. A mark is the gradient of a weight, so that
// whatever adds up, averages or scales gradients does the same to marks, and
// each gradient is applied times its factor in the sum. A step that is not
// taken leaves no mark, and its gradients are dropped in time.

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
  // Open lookups of a replica, and gradients of it that wait for an update.
  static constexpr int64_t kMaxOpen = 64;
  // An update drops what is so many lookups older than those it applies.
  static constexpr int64_t kKeptBehind = 8;

  // By place, one for each gradient that may wait: a factor, and the factor
  // times the generation of the place. Their quotient tells of whom it is.
  static constexpr int64_t kMarkSize = 2 * kMaxOpen;
  using Mark = std::array<float, kMarkSize>;

  // Counts its lookups and updates in `engine`, which must outlive it.
  explicit TokenSteps(HostEngine* engine);

  // Keeps a checked batch; its token is larger than all before it.
  Status Open(int32_t replica, std::shared_ptr<const Batch> batch,
              int64_t* token);

  // Takes the newest lookup of a replica back, as if it had never been opened.
  // Refused if a newer one was opened or an update has dropped it.
  Status TakeBack(int32_t replica, int64_t token);

  Status Find(int32_t replica, int64_t token,
              std::shared_ptr<const Batch>* batch) const;

  // Keeps gradients of a lookup, which may come more than once, each time with
  // a mark of its own.
  Status Follow(int32_t replica, int64_t token, BatchGradients gradients,
                Mark* mark);

  // Takes the sum of marks of one replica. With the last replica's comes the
  // update of all, or null if there are no marks; it must be prepared, run, and
  // then `FinishApply`. If it failed, the replica may apply again.
  Status BeginApply(int32_t replica, Span<const float> marks,
                    std::vector<std::vector<float>> hyperparameters,
                    std::shared_ptr<HostEngine::Step>* update);
  // Scales the gradients and finds the unique rows.
  void Prepare(HostEngine::Step* update, const ParallelFor& parallel_for) const;
  void FinishApply(int32_t replica, const HostEngine::Step& update,
                   bool updated);

  // Calls `visit(batch)` for the batches of all lookups that are kept, and of
  // what runs now though a reset has forgotten it.
  void VisitInFlight(const std::function<void(const Batch&)>& visit) const;

  // Forgets everything; tokens are counted on.
  void Reset();

  // Whether an update runs, or waits for other replicas.
  bool IsApplying() const;

  // By replica: lookups that are open, and gradients that wait.
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
    // Of the update that waits for other replicas: numbers and factors.
    bool is_applying = false;
    std::vector<std::pair<int64_t, float>> applying;
  };

  Status CheckReplica(int32_t replica) const;
  Status FindLocked(int32_t replica, int64_t token,
                    std::shared_ptr<const Batch>* batch) const;
  Status ReadMarks(int32_t replica, Span<const float> marks,
                   std::vector<std::pair<int64_t, float>>* applying) const;
  Status Refuse(int32_t replica, Status status);
  std::string TableNames() const;
  std::shared_ptr<HostEngine::Step> MakeUpdate() const;
  void EndRound();

  HostEngine* const engine_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<Replica> replicas_;
  bool is_updating_ = false;
  mutable BatchesInUse in_use_;  // `Find` hands batches out
  std::string refused_;  // why the replicas' steps no longer pair, or empty
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_TOKEN_STEPS_H_
