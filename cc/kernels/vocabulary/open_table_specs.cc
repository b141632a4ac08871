#include "cc/kernels/vocabulary/open_table_specs.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/keys/first_values.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

absl::Status ReadOpenTableSpecs(tensorflow::OpKernelConstruction* ctx,
                                std::vector<OpenTableSpec>* specs) {
  std::vector<int32_t> tables, kinds;
  std::vector<bool> has_unknown_row;
  std::vector<std::string> admissions, evictions, values;
  std::vector<int64_t> policies, seeds;
  std::vector<float> limits;
  TF_RETURN_IF_ERROR(ctx->GetAttr("open_tables", &tables));
  TF_RETURN_IF_ERROR(ctx->GetAttr("key_kinds", &kinds));
  TF_RETURN_IF_ERROR(ctx->GetAttr("has_unknown_row", &has_unknown_row));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admissions", &admissions));
  TF_RETURN_IF_ERROR(ctx->GetAttr("evictions", &evictions));
  TF_RETURN_IF_ERROR(ctx->GetAttr("policies", &policies));
  TF_RETURN_IF_ERROR(ctx->GetAttr("first_values", &values));
  TF_RETURN_IF_ERROR(ctx->GetAttr("first_limits", &limits));
  TF_RETURN_IF_ERROR(ctx->GetAttr("first_seeds", &seeds));
  const size_t size = tables.size();
  if (kinds.size() != size || has_unknown_row.size() != size ||
      admissions.size() != size || evictions.size() != size ||
      policies.size() != kNumPolicyNumbers * size || values.size() != size ||
      limits.size() != 2 * size || seeds.size() != size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "The lists about open tables must be of one size each. Received: ",
        size, " tables and other sizes"));
  }
  for (size_t i = 0; i < size; ++i) {
    OpenTableSpec spec;
    spec.table = tables[i];
    spec.has_unknown_row = has_unknown_row[i];
    spec.kind = static_cast<KeyKind>(kinds[i]);
    spec.values.a = limits[2 * i];
    spec.values.b = limits[2 * i + 1];
    spec.values.seed = static_cast<uint64_t>(seeds[i]);
    TF_RETURN_IF_ERROR(ToTf(ParseFirstValues(values[i], &spec.values.kind)));
    TF_RETURN_IF_ERROR(ReadPolicy(admissions[i], evictions[i], policies,
                                  kNumPolicyNumbers * i, &spec.policy));
    specs->push_back(spec);
  }
  return absl::OkStatus();
}

}  // namespace layoutmap
