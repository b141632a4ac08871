#include "cc/kernels/vocabulary/open_table_specs.h"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/core/served_keys/key_step.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

absl::Status OpenTableRules::Read(tensorflow::OpKernelConstruction* ctx) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("has_unknown_row", &has_unknown_row_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admissions", &admissions_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("evictions", &evictions_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("policies", &policies_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("first_values", &first_values_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("first_limits", &limits_));
  return ctx->GetAttr("first_seeds", &seeds_);
}

bool OpenTableRules::AreOf(size_t size) const {
  return has_unknown_row_.size() == size && admissions_.size() == size &&
         evictions_.size() == size && first_values_.size() == size &&
         policies_.size() == kNumPolicyNumbers * size &&
         limits_.size() == 2 * size && seeds_.size() == size;
}

absl::Status OpenTableRules::Get(size_t i, VocabularyPolicy* policy,
                                 FirstValues* values) const {
  values->a = limits_[2 * i];
  values->b = limits_[2 * i + 1];
  values->seed = static_cast<uint64_t>(seeds_[i]);
  TF_RETURN_IF_ERROR(ToTf(ParseFirstValues(first_values_[i], &values->kind)));
  return ReadPolicy(admissions_[i], evictions_[i], policies_,
                    kNumPolicyNumbers * i, policy);
}

absl::Status ReadOpenTableSpecs(tensorflow::OpKernelConstruction* ctx,
                                std::vector<OpenTableSpec>* specs) {
  std::vector<int32_t> tables, owners;
  OpenTableRules rules;
  TF_RETURN_IF_ERROR(ctx->GetAttr("open_tables", &tables));
  TF_RETURN_IF_ERROR(ctx->GetAttr("vocabulary_of", &owners));
  TF_RETURN_IF_ERROR(rules.Read(ctx));
  const size_t size = tables.size();
  if (owners.empty()) {
    owners.resize(size);
    std::iota(owners.begin(), owners.end(), 0);
  }
  if (owners.size() != size || !rules.AreOf(size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "The lists about open tables must have the same size. Received: ", size,
        " `open_tables` and lists of other sizes"));
  }
  for (size_t i = 0; i < size; ++i) {
    const int32_t owner = owners[i];
    if (owner < 0 || owner >= static_cast<int32_t>(size) ||
        owners[owner] != owner) {
      return absl::InvalidArgumentError(
          absl::StrCat("`vocabulary_of` must be indices into `open_tables` of "
                       "tables that own a vocabulary. Received: ",
                       owner));
    }
    OpenTableSpec spec;
    spec.table = tables[i];
    spec.owner = static_cast<size_t>(owner);
    spec.has_unknown_row = rules.has_unknown_row(i);
    TF_RETURN_IF_ERROR(rules.Get(i, &spec.policy, &spec.values));
    specs->push_back(spec);
  }
  return absl::OkStatus();
}

absl::Status ReadOpenTables(tensorflow::OpKernelConstruction* ctx,
                            size_t num_tables, std::vector<int32_t>* numbers,
                            std::vector<OpenTable>* tables) {
  std::vector<bool> has_unknown_row;
  TF_RETURN_IF_ERROR(ctx->GetAttr("open_tables", numbers));
  TF_RETURN_IF_ERROR(ctx->GetAttr("has_unknown_row", &has_unknown_row));
  tables->resize(num_tables);
  if (has_unknown_row.size() != numbers->size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`has_unknown_row` must have one value for each of the ",
        numbers->size(), " `open_tables`. Received: ", has_unknown_row.size()));
  }
  for (size_t i = 0; i < numbers->size(); ++i) {
    const int32_t number = (*numbers)[i];
    if (number < 0 || number >= static_cast<int32_t>(num_tables) ||
        (*tables)[number].is_open) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`open_tables` must be distinct tables. Received: ", number));
    }
    (*tables)[number].is_open = true;
    (*tables)[number].has_unknown_row = has_unknown_row[i];
  }
  return absl::OkStatus();
}

absl::Status ReadKeyKinds(tensorflow::OpKernelContext* ctx, size_t num_tables,
                          std::vector<KeyKind>* kinds) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(GetInput(ctx, "key_kinds", 1, &tensor));
  if (tensor->NumElements() != static_cast<int64_t>(num_tables)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`key_kinds` must have one number for each of the ", num_tables,
        " open tables. Received: shape ", tensor->shape().DebugString()));
  }
  kinds->clear();
  for (size_t i = 0; i < num_tables; ++i) {
    const int32_t kind = tensor->vec<int32_t>()(static_cast<int64_t>(i));
    if (kind < kNoKeysYet || kind > kStringKeys) {
      return absl::InvalidArgumentError(
          absl::StrCat("`key_kinds` must be in [0, 2]. Received: ", kind));
    }
    kinds->push_back(static_cast<KeyKind>(kind));
  }
  return absl::OkStatus();
}

}  // namespace layoutmap
