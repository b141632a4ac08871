#include "cc/kernels/engine/engine_config_reader.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/quantization.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;

absl::Status ReadTables(OpKernelConstruction* ctx, EngineConfig* config) {
  std::vector<std::string> names, placements, optimizers;
  std::vector<int64_t> num_rows, dims, num_shards, offsets;
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_names", &names));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_num_rows", &num_rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_dims", &dims));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_num_shards", &num_shards));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_placements", &placements));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_offsets", &offsets));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_optimizers", &optimizers));
  int64_t next = 0;
  for (size_t t = 0; t < names.size(); ++t) {
    if (t >= num_rows.size() || t >= dims.size() || t >= num_shards.size() ||
        t >= placements.size() || t >= optimizers.size() || num_shards[t] < 1 ||
        num_shards[t] >= static_cast<int64_t>(offsets.size()) - next) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table '", names[t], "': an attribute `table_*` has too few values"));
    }
    TableSpec table;
    table.name = names[t];
    table.dim = dims[t];
    Placement placement;
    TF_RETURN_IF_ERROR(ToTf(ParsePlacement(placements[t], &placement)));
    TF_RETURN_IF_ERROR(ToTf(ParseOptimizer(optimizers[t], &table.optimizer)));
    TF_RETURN_IF_ERROR(ToTf(RowPartition::Make(
        placement, Span<const int64_t>(&offsets[next], num_shards[t] + 1),
        &table.partition)));
    next += num_shards[t] + 1;
    if (table.partition.num_rows() != num_rows[t]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table '", names[t],
          "': its offsets must end with its number of rows, ", num_rows[t],
          ". Received: ", table.partition.num_rows()));
    }
    config->tables.push_back(std::move(table));
  }
  const size_t count = names.size();
  if (num_rows.size() != count || dims.size() != count ||
      num_shards.size() != count || placements.size() != count ||
      optimizers.size() != count ||
      next != static_cast<int64_t>(offsets.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "An attribute `table_*` has too many values for ", count, " tables"));
  }
  return absl::OkStatus();
}

absl::Status ReadQuantization(OpKernelConstruction* ctx, EngineConfig* config) {
  std::vector<int64_t> num_buckets;
  std::vector<float> limits;
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_num_buckets", &num_buckets));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_limits", &limits));
  const size_t count = config->tables.size();
  if (num_buckets.empty() && limits.empty()) return absl::OkStatus();
  if (num_buckets.size() != count || limits.size() != 2 * count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`table_num_buckets` must have one value and `table_limits` two for "
        "each of the ",
        count, " tables, or both must be empty. Received: ", num_buckets.size(),
        " and ", limits.size()));
  }
  for (size_t t = 0; t < count; ++t) {
    TableSpec& table = config->tables[t];
    if (num_buckets[t] == 0) continue;
    table.is_quantized = true;
    TF_RETURN_IF_ERROR(
        ToTf(MakeQuantization(limits[2 * t], limits[2 * t + 1], num_buckets[t],
                              table.name, &table.quantization)));
  }
  return absl::OkStatus();
}

absl::Status ReadRowTypes(OpKernelConstruction* ctx, EngineConfig* config) {
  std::vector<tensorflow::DataType> types;
  int64_t seed;
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_dtypes", &types));
  TF_RETURN_IF_ERROR(ctx->GetAttr("rounding_seed", &seed));
  config->rounding_seed = static_cast<uint64_t>(seed);
  if (types.empty()) return absl::OkStatus();
  if (types.size() != config->tables.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`table_dtypes` must have one value for each of the ",
                     config->tables.size(),
                     " tables, or be empty. Received: ", types.size()));
  }
  for (size_t t = 0; t < types.size(); ++t) {
    config->tables[t].row_type =
        types[t] == tensorflow::DT_BFLOAT16 ? RowType::kBfloat16
        : types[t] == tensorflow::DT_HALF   ? RowType::kFloat16
                                            : RowType::kFloat32;
  }
  return absl::OkStatus();
}

absl::Status ReadFeatures(OpKernelConstruction* ctx, EngineConfig* config) {
  std::vector<std::string> names, combiners;
  std::vector<int64_t> lengths;
  TF_RETURN_IF_ERROR(ctx->GetAttr("feature_names", &names));
  TF_RETURN_IF_ERROR(ctx->GetAttr("feature_combiners", &combiners));
  TF_RETURN_IF_ERROR(ctx->GetAttr("feature_tables", &config->table_of_feature));
  TF_RETURN_IF_ERROR(ctx->GetAttr("feature_max_sequence_lengths", &lengths));
  std::string out_of_range;
  TF_RETURN_IF_ERROR(ctx->GetAttr("out_of_range", &out_of_range));
  const std::vector<int32_t>& tables = config->table_of_feature;
  for (size_t f = 0; f < names.size(); ++f) {
    if (f >= combiners.size() || f >= tables.size() || f >= lengths.size() ||
        tables[f] < 0 ||
        tables[f] >= static_cast<int64_t>(config->tables.size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Feature '", names[f],
          "': an attribute `feature_*` has too few values or names no table"));
    }
    const TableSpec& table = config->tables[tables[f]];
    FeatureSpec feature;
    feature.feature = names[f];
    feature.table = table.name;
    feature.num_rows = table.partition.num_rows();
    feature.max_sequence_length = lengths[f];
    TF_RETURN_IF_ERROR(ToTf(ParseCombiner(combiners[f], &feature.combiner)));
    TF_RETURN_IF_ERROR(
        ToTf(ParseOutOfRange(out_of_range, &feature.out_of_range)));
    feature.advice =
        "; set out_of_range=\"drop\" or \"clip\" of TPUEmbedding to accept it";
    config->features.push_back(std::move(feature));
  }
  const size_t count = names.size();
  if (combiners.size() != count || tables.size() != count ||
      lengths.size() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("An attribute `feature_*` has too many values for ", count,
                     " features"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadEngineConfig(OpKernelConstruction* ctx, EngineConfig* config) {
  TF_RETURN_IF_ERROR(ReadTables(ctx, config));
  TF_RETURN_IF_ERROR(ReadFeatures(ctx, config));
  TF_RETURN_IF_ERROR(ReadQuantization(ctx, config));
  return ReadRowTypes(ctx, config);
}

}  // namespace layoutmap
