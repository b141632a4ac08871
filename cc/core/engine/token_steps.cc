#include "cc/core/engine/token_steps.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/expiry.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/marks.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/gradient_coordinates.h"
#include "cc/core/steps/step.h"

namespace layoutmap {
namespace {

using std::to_string;

// Returns whether a batch contains keys of an open vocabulary.
bool HasKeys(const Batch& batch) {
  return std::any_of(batch.begin(), batch.end(), [](const RaggedIds& ids) {
    return ids.vocabulary_step() > 0;
  });
}

BatchGradients Scaled(const BatchGradients& gradients, float factor) {
  auto values = std::make_shared<std::vector<std::vector<float>>>();
  BatchGradients scaled;
  for (const Span<const float> feature : gradients.features) {
    values->emplace_back(feature.size());
    // A factor of 0 also removes values that are not finite.
    if (factor == 0) continue;
    for (int64_t i = 0; i < feature.size(); ++i) {
      values->back()[i] = feature[i] * factor;
    }
  }
  for (const std::vector<float>& feature : *values) {
    scaled.features.push_back(feature);
  }
  scaled.keep_alive = std::move(values);
  return scaled;
}

}  // namespace

TokenSteps::TokenSteps(HostEngine* engine)
    : engine_(engine), replicas_(engine->config().num_replicas) {}

Status TokenSteps::CheckReplica(int32_t replica) const {
  const int32_t num_replicas = engine_->config().num_replicas;
  if (replica >= 0 && replica < num_replicas) return Status();
  return InvalidArgument("`replica` must be in [0, " + to_string(num_replicas) +
                         "). Received: " + to_string(replica));
}

std::string TokenSteps::TableNames() const {
  std::string names;
  for (const TableSpec& table : engine_->config().tables) {
    names += (names.empty() ? "'" : ", '") + table.name + "'";
  }
  return names;
}

Status TokenSteps::Open(int32_t replica, std::shared_ptr<const Batch> batch,
                        int64_t* token) {
  LM_RETURN_IF_ERROR(CheckReplica(replica));
  engine_->CountBatch(*batch);
  std::lock_guard<std::mutex> lock(mutex_);
  // If a step failed in one replica, the step ends when replica 0 begins the
  // next step.
  if (replica == 0 && !error_.empty()) EndRound();
  Replica& r = replicas_[replica];
  // The memory of applied gradients is freed before the next gradients arrive.
  DiscardApplied();
  *token = r.next_token++;
  r.open.emplace(*token, std::move(batch));
  if (static_cast<int64_t>(r.open.size()) > kMaxOpen) {
    r.first_of_newest = r.open.begin()->first + 1;
    r.open.erase(r.open.begin());
  }
  return Status();
}

Status TokenSteps::TakeBack(int32_t replica, int64_t token) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<const Batch> batch;
  LM_RETURN_IF_ERROR(FindLocked(replica, token, &batch));
  Replica& r = replicas_[replica];
  if (token != r.next_token - 1) {
    return FailedPrecondition(
        "Only the newest lookup can be taken back. Received: lookup " +
        to_string(token) + " of replica " + to_string(replica) + ", newest " +
        to_string(r.next_token - 1));
  }
  r.open.erase(token);
  engine_->CountBatch(*batch, -1);
  return Status();
}

Status TokenSteps::FindLocked(int32_t replica, int64_t token,
                              std::shared_ptr<const Batch>* batch) const {
  LM_RETURN_IF_ERROR(CheckReplica(replica));
  const Replica& r = replicas_[replica];
  if (token < 1 || token >= r.next_token) {
    return InvalidArgument("`token` must belong to a lookup of replica " +
                           to_string(replica) +
                           ". Received: " + to_string(token));
  }
  for (const auto* lookups : {&r.open, &r.applied_open}) {
    const auto found = lookups->find(token);
    if (found == lookups->end()) continue;
    *batch = found->second;
    return Status();
  }
  return FailedPrecondition(
      "Lookup " + to_string(token) + " of replica " + to_string(replica) +
      " has expired: " +
      ExpiryReason(WhyExpired(r, token), kMaxOpen, kKeptBehind) + " (tables " +
      TableNames() + ")");
}

Expiry TokenSteps::WhyExpired(const Replica& r, int64_t token) {
  if (token < r.first_after_reset) return Expiry::kReset;
  if (token < r.first_of_newest) return Expiry::kTooManyNewer;
  if (token < r.first_after_update) return Expiry::kOlderThanUpdate;
  return Expiry::kApplied;
}

const TokenSteps::Followed* TokenSteps::FindFollowed(const Replica& r,
                                                     int64_t number) {
  for (const auto* gradients : {&r.followed, &r.applied}) {
    const auto found = gradients->find(number);
    if (found != gradients->end()) return &found->second;
  }
  return nullptr;
}

Status TokenSteps::Find(int32_t replica, int64_t token,
                        std::shared_ptr<const Batch>* batch) const {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(FindLocked(replica, token, batch));
  in_use_.Add(*batch);
  return Status();
}

Status TokenSteps::Follow(int32_t replica, int64_t token,
                          BatchGradients gradients,
                          Span<const float> coordinates,
                          const ParallelFor& parallel_for, Mark* mark) {
  for (const TableSpec& table : engine_->config().tables) {
    if (table.optimizer == Optimizer::kNone) {
      return FailedPrecondition("Table '" + table.name +
                                "' has no optimizer: it cannot be trained");
    }
  }
  Followed followed;
  // The earlier gradients of this lookup, and their numbers.
  std::vector<BatchGradients> of_lookup;
  std::vector<int64_t> numbers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    LM_RETURN_IF_ERROR(FindLocked(replica, token, &followed.batch));
    LM_RETURN_IF_ERROR(
        CheckGradients(engine_->config(), *followed.batch, gradients));
    const Replica& r = replicas_[replica];
    std::map<int64_t, const Followed*> earlier;
    for (const auto* gradients : {&r.applied, &r.followed}) {
      for (const auto& [number, one] : *gradients) {
        if (one.token == token) earlier.emplace(number, &one);
      }
    }
    for (const auto& [number, one] : earlier) {
      numbers.push_back(number);
      of_lookup.push_back(one->gradients);
    }
  }
  std::vector<float> values(coordinates.begin(), coordinates.end());
  of_lookup.push_back(gradients);
  if (values.empty()) {
    values = GradientCoordinates(engine_->config(), *followed.batch, of_lookup,
                                 parallel_for);
  }
  followed.token = token;
  followed.gradients = std::move(gradients);
  std::lock_guard<std::mutex> lock(mutex_);
  // Another thread may have discarded the lookup in the meantime.
  LM_RETURN_IF_ERROR(FindLocked(replica, token, &followed.batch));
  Replica& r = replicas_[replica];
  const int64_t number = r.next_followed++;
  numbers.push_back(number);
  // Coordinates relative to gradients that are not stored are not used.
  const size_t size = std::min(numbers.size(), values.size());
  numbers.erase(numbers.begin(), numbers.end() - size);
  values.erase(values.begin(), values.end() - size);
  followed.mark = IssueMark(numbers, values);
  *mark = followed.mark;
  r.followed.erase(number - kMaxOpen);
  r.applied.erase(number - kMaxOpen);
  r.followed.emplace(number, std::move(followed));
  return Status();
}

Status TokenSteps::ReadSum(int32_t replica, Span<const float> marks,
                           std::vector<Factor>* applying) const {
  const auto num_replicas = static_cast<int32_t>(replicas_.size());
  if (marks.size() != num_replicas * kMarkSize) {
    return InvalidArgument("`marks` must have " +
                           to_string(num_replicas * kMarkSize) +
                           " values. Received: " + to_string(marks.size()));
  }
  const std::string where =
      " (replica " + to_string(replica) + ", tables " + TableNames() + ")";
  for (int32_t other = 0; other < num_replicas; ++other) {
    const Replica& r = replicas_[other];
    std::vector<IssuedMark> issued;
    for (const auto* gradients : {&r.applied, &r.followed}) {
      for (const auto& [number, followed] : *gradients) {
        issued.push_back({number, &followed.mark});
      }
    }
    std::vector<MarkFactor> factors;
    LM_RETURN_IF_ERROR(layoutmap::ReadMarks(
        issued, {marks.data() + other * kMarkSize, kMarkSize}, where,
        &factors));
    for (const MarkFactor& one : factors) {
      // Zeros are not a second step of applied gradients.
      if (one.factor == 0 && r.applied.count(one.number) > 0) continue;
      applying->push_back({other, one.number, one.factor});
    }
  }
  if (!applying->empty() || !IsZero(marks)) return Status();
  // The sum may have been replaced by zeros. If the newest lookup is newer than
  // the last update, the zeros replace its gradients.
  const Replica& r = replicas_[replica];
  const int64_t newest =
      r.followed.empty() ? 0 : r.followed.rbegin()->second.token;
  if (newest <= r.last_applied) return Status();
  for (const auto& [number, followed] : r.followed) {
    if (followed.token == newest) applying->push_back({replica, number, 0.0f});
  }
  return Status();
}

// Returns the gradients of each replica that are part of the update, in the
// order of their lookups. Gradients of the same lookup stay in the order in
// which they were passed. If the gradients are in the sums of several replicas,
// their factors are added.
std::vector<std::vector<TokenSteps::Factor>> TokenSteps::FactorsByReplica()
    const {
  // The sums of the factors, by replica, token and number. They are computed in
  // double precision: the mean over three replicas is a sum of three thirds.
  std::vector<std::map<std::pair<int64_t, int64_t>, double>> found(
      replicas_.size());
  for (const Replica& r : replicas_) {
    for (const Factor& one : r.applying) {
      const Followed* followed =
          FindFollowed(replicas_[one.replica], one.number);
      if (followed == nullptr) continue;
      found[one.replica][{followed->token, one.number}] += one.factor;
    }
  }
  std::vector<std::vector<Factor>> applied(replicas_.size());
  for (size_t i = 0; i < found.size(); ++i) {
    for (const auto& [key, factor] : found[i]) {
      applied[i].push_back(
          {static_cast<int32_t>(i), key.second, static_cast<float>(factor)});
    }
  }
  return applied;
}

Status TokenSteps::Fail(int32_t replica, Status status) {
  // The other replicas must not apply this step. Otherwise, their gradients for
  // this step would be combined with the next step of this replica.
  if (engine_->config().num_replicas > 1) {
    error_ = "replica " + to_string(replica) + ": " + status.message();
  }
  return status;
}

Status TokenSteps::BeginApply(int32_t replica, Span<const float> marks,
                              std::vector<std::vector<float>> hyperparameters,
                              std::shared_ptr<HostEngine::Step>* update) {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(CheckReplica(replica));
  if (!error_.empty()) {
    return FailedPrecondition(
        "A step must be applied by all replicas, and this step failed: " +
        error_);
  }
  if (is_updating_) {
    return NotYet("Gradients of replica " + to_string(replica) +
                  " must not be applied while another update runs");
  }
  Replica& r = replicas_[replica];
  if (r.is_applying) {
    std::string missing;
    for (size_t other = 0; other < replicas_.size(); ++other) {
      if (replicas_[other].is_applying) continue;
      missing += (missing.empty() ? "" : ", ") + to_string(other);
    }
    return Fail(
        replica,
        FailedPrecondition(
            "All replicas must apply a step before one of them applies the "
            "next step. Missing replicas: " +
            missing));
  }
  std::vector<Factor> applying;
  Status status = ReadSum(replica, marks, &applying);
  if (!status.ok()) return Fail(replica, std::move(status));
  r.applying = std::move(applying);
  r.is_applying = true;
  for (const Replica& other : replicas_) {
    if (!other.is_applying) return Status();
  }
  *update = MakeUpdate();
  if (*update == nullptr) {
    EndRound();
    return Status();
  }
  (*update)->hyperparameters = std::move(hyperparameters);
  for (const std::shared_ptr<const Batch>& batch : (*update)->batches) {
    in_use_.Add(batch);
  }
  is_updating_ = true;
  return Status();
}

// Gradients are summed in the order feature, lookup, replica. The order is the
// same as if one replica had all samples of each lookup.
std::shared_ptr<HostEngine::Step> TokenSteps::MakeUpdate() const {
  auto step = std::make_shared<HostEngine::Step>();
  const std::vector<std::vector<Factor>> applied = FactorsByReplica();
  size_t num_lookups = 0;
  for (const std::vector<Factor>& of_replica : applied) {
    num_lookups = std::max(num_lookups, of_replica.size());
  }
  if (num_lookups == 0) return nullptr;
  for (size_t i = 0; i < num_lookups; ++i) {
    for (const std::vector<Factor>& of_replica : applied) {
      if (i >= of_replica.size()) continue;
      const Factor& one = of_replica[i];
      const Followed& followed =
          *FindFollowed(replicas_[one.replica], one.number);
      step->batches.push_back(followed.batch);
      step->gradients.push_back(followed.gradients);
      step->factors.push_back(one.factor);
    }
  }
  return step;
}

void TokenSteps::Prepare(HostEngine::Step* update,
                         const ParallelFor& parallel_for) const {
  for (size_t i = 0; i < update->gradients.size(); ++i) {
    if (update->factors[i] == 1.0f) continue;
    update->gradients[i] = Scaled(update->gradients[i], update->factors[i]);
  }
  PrepareTables(engine_->config(), update->batches, parallel_for,
                &update->tables);
}

void TokenSteps::FinishApply(int32_t replica, const HostEngine::Step& update,
                             bool updated) {
  if (updated) engine_->CountUpdate(update.tables);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_updating_) return;  // The steps were reset.
  is_updating_ = false;
  if (!updated) {
    replicas_[replica].is_applying = false;
    if (replicas_.size() > 1) error_ = "the update failed";
    return;
  }
  const std::vector<std::vector<Factor>> applied = FactorsByReplica();
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (applied[i].empty()) continue;
    Replica& r = replicas_[i];
    const int64_t oldest = FindFollowed(r, applied[i][0].number)->token;
    for (const Factor& one : applied[i]) {
      const auto followed = r.followed.find(one.number);
      if (followed == r.followed.end()) continue;  // It was applied again.
      const int64_t token = followed->second.token;
      r.last_applied = std::max(r.last_applied, token);
      // After the update, the vocabulary may assign the rows of the lookup to
      // other keys.
      const auto open = r.open.find(token);
      if (open != r.open.end() && HasKeys(*open->second)) {
        r.applied_open.insert(r.open.extract(open));
      }
      r.applied.insert(r.followed.extract(followed));
    }
    const int64_t first_kept = oldest - kKeptBehind;
    r.first_after_update = std::max(r.first_after_update, first_kept);
    r.open.erase(r.open.begin(), r.open.lower_bound(first_kept));
    for (auto it = r.followed.begin(); it != r.followed.end();) {
      it = it->second.token < first_kept ? r.followed.erase(it) : ++it;
    }
  }
  EndRound();
}

void TokenSteps::EndRound() {
  error_.clear();
  for (Replica& r : replicas_) {
    r.is_applying = false;
    r.applying.clear();
  }
}

void TokenSteps::DiscardApplied() const {
  std::set<std::pair<int32_t, int64_t>> used;
  for (const Replica& r : replicas_) {
    for (const Factor& one : r.applying) used.emplace(one.replica, one.number);
  }
  for (size_t i = 0; i < replicas_.size(); ++i) {
    Replica& r = replicas_[i];
    r.applied_open.clear();
    for (auto it = r.applied.begin(); it != r.applied.end();) {
      const bool is_used = used.count({static_cast<int32_t>(i), it->first}) > 0;
      it = is_used ? std::next(it) : r.applied.erase(it);
    }
  }
}

void TokenSteps::VisitInFlight(
    const std::function<void(const Batch&)>& visit) const {
  std::lock_guard<std::mutex> lock(mutex_);
  DiscardApplied();
  for (const Replica& r : replicas_) {
    for (const auto& [token, batch] : r.open) visit(*batch);
    for (const auto* gradients : {&r.followed, &r.applied}) {
      for (const auto& [number, followed] : *gradients) visit(*followed.batch);
    }
  }
  in_use_.Visit(visit);
}

void TokenSteps::Reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_updating_ = false;
  EndRound();
  for (Replica& r : replicas_) {
    r.open.clear();
    r.followed.clear();
    r.applied_open.clear();
    r.applied.clear();
    r.first_after_reset = r.next_token;
  }
}

bool TokenSteps::IsApplying() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_updating_ ||
         std::any_of(replicas_.begin(), replicas_.end(),
                     [](const Replica& r) { return r.is_applying; });
}

std::vector<int64_t> TokenSteps::NumOpen() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> sizes;
  for (const Replica& r : replicas_) sizes.push_back(r.open.size());
  return sizes;
}

std::vector<int64_t> TokenSteps::NumFollowed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> sizes;
  for (const Replica& r : replicas_) sizes.push_back(r.followed.size());
  return sizes;
}

}  // namespace layoutmap
