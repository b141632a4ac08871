#include "cc/core/engine/token_steps.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {
namespace {

using std::to_string;

// Number of distinct generations, which must be far below 2^24, because a
// generation is computed as the quotient of two floats.
constexpr int64_t kGenerations = 1000;

// The value in a mark that represents a factor of 1. The value is small enough
// that marks do not affect the global norm of gradients, which is used for
// clipping, and is a power of two, so that no precision is lost.
constexpr float kUnit = 1.0f / (int64_t{1} << 40);

int64_t PlaceOf(int64_t number) { return number % TokenSteps::kMaxOpen; }

float GenerationOf(int64_t number) {
  return 1 + number / TokenSteps::kMaxOpen % kGenerations;
}

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
    values->emplace_back(feature.data(), feature.data() + feature.size());
    for (float& value : values->back()) value *= factor;
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
  *token = r.next_token++;
  r.open.emplace(*token, std::move(batch));
  if (static_cast<int64_t>(r.open.size()) > kMaxOpen) {
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
  const auto found = r.open.find(token);
  if (found == r.open.end()) {
    return FailedPrecondition(
        "Lookup " + to_string(token) + " of replica " + to_string(replica) +
        " has expired. Its gradients must arrive before " +
        to_string(kMaxOpen) +
        " newer lookups, before an update of a lookup that is " +
        to_string(kKeptBehind) +
        " lookups newer, before the update of this lookup if tables have open "
        "vocabularies, and before a reset or a restore (tables " +
        TableNames() + ")");
  }
  *batch = found->second;
  return Status();
}

Status TokenSteps::Find(int32_t replica, int64_t token,
                        std::shared_ptr<const Batch>* batch) const {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(FindLocked(replica, token, batch));
  in_use_.Add(*batch);
  return Status();
}

Status TokenSteps::Follow(int32_t replica, int64_t token,
                          BatchGradients gradients, Mark* mark) {
  for (const TableSpec& table : engine_->config().tables) {
    if (table.optimizer == Optimizer::kNone) {
      return FailedPrecondition("Table '" + table.name +
                                "' has no optimizer: it cannot be trained");
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Followed followed;
  LM_RETURN_IF_ERROR(FindLocked(replica, token, &followed.batch));
  LM_RETURN_IF_ERROR(
      CheckGradients(engine_->config(), *followed.batch, gradients));
  followed.token = token;
  followed.gradients = std::move(gradients);
  Replica& r = replicas_[replica];
  const int64_t number = r.next_followed++;
  r.followed.erase(number - kMaxOpen);
  r.followed.emplace(number, std::move(followed));
  mark->fill(0.0f);
  (*mark)[2 * PlaceOf(number)] = kUnit;
  (*mark)[2 * PlaceOf(number) + 1] = kUnit * GenerationOf(number);
  return Status();
}

Status TokenSteps::ReadMarks(
    int32_t replica, Span<const float> marks,
    std::vector<std::pair<int64_t, float>>* applying) const {
  if (marks.size() != kMarkSize) {
    return InvalidArgument("`marks` must have " + to_string(kMarkSize) +
                           " values. Received: " + to_string(marks.size()));
  }
  const Replica& r = replicas_[replica];
  for (int64_t place = 0; place < kMaxOpen; ++place) {
    const float factor = marks[2 * place] / kUnit;
    const float product = marks[2 * place + 1] / kUnit;
    if (factor == 0.0f && product == 0.0f) continue;
    // Number of the newest gradients in this place.
    const int64_t newest =
        r.next_followed - 1 - PlaceOf(r.next_followed - 1 - place + kMaxOpen);
    const bool is_finite = std::isfinite(factor) && std::isfinite(product);
    const bool is_of_newest =
        !is_finite || std::fabs(product / factor - GenerationOf(newest)) < 0.25;
    if (r.followed.count(newest) == 0 || !is_of_newest) {
      return FailedPrecondition(
          "The gradients to apply have expired in replica " +
          to_string(replica) + ": they were already applied, or " +
          to_string(kMaxOpen) +
          " newer gradients, an update of a lookup that is " +
          to_string(kKeptBehind) +
          " lookups newer, a reset or a restore came first (tables " +
          TableNames() + ")");
    }
    applying->emplace_back(newest, factor);
  }
  // Sorts the gradients by lookup. Gradients of the same lookup stay in the
  // order in which they were passed.
  std::sort(applying->begin(), applying->end(),
            [&](const auto& one, const auto& other) {
              return std::make_pair(r.followed.at(one.first).token, one.first) <
                     std::make_pair(r.followed.at(other.first).token,
                                    other.first);
            });
  return Status();
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
  std::vector<std::pair<int64_t, float>> applying;
  Status status = ReadMarks(replica, marks, &applying);
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
  size_t num_lookups = 0;
  for (const Replica& r : replicas_) {
    num_lookups = std::max(num_lookups, r.applying.size());
  }
  if (num_lookups == 0) return nullptr;
  for (size_t i = 0; i < num_lookups; ++i) {
    for (const Replica& r : replicas_) {
      if (i >= r.applying.size()) continue;
      const auto& [number, factor] = r.applying[i];
      const Followed& followed = r.followed.at(number);
      step->batches.push_back(followed.batch);
      step->gradients.push_back(followed.gradients);
      step->factors.push_back(factor);
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
  for (Replica& r : replicas_) {
    if (r.applying.empty()) continue;
    const int64_t oldest = r.followed.at(r.applying[0].first).token;
    for (const auto& [number, factor] : r.applying) {
      const Followed& applied = r.followed.at(number);
      // After the update, the vocabulary may assign the rows of the lookup to
      // other keys.
      if (HasKeys(*applied.batch)) r.open.erase(applied.token);
      r.followed.erase(number);
    }
    const int64_t first_kept = oldest - kKeptBehind;
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

void TokenSteps::VisitInFlight(
    const std::function<void(const Batch&)>& visit) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Replica& r : replicas_) {
    for (const auto& [token, batch] : r.open) visit(*batch);
    for (const auto& [number, followed] : r.followed) visit(*followed.batch);
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
