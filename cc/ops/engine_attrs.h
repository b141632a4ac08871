// Attributes that describe the tables and features of a host engine. Every op
// that needs this configuration declares these attributes. The kernels read
// them with cc/kernels/engine/engine_config_reader.h.

#ifndef TF_LAYOUTMAP_OPS_ENGINE_ATTRS_H_
#define TF_LAYOUTMAP_OPS_ENGINE_ATTRS_H_

// A chain of `.Attr(...)` calls. Use it in a REGISTER_OP statement.
#define LM_ENGINE_CONFIG_ATTRS                                  \
  .Attr("table_names: list(string)")                            \
      .Attr("table_num_rows: list(int)")                        \
      .Attr("table_dims: list(int)")                            \
      .Attr("table_num_shards: list(int)")                      \
      .Attr("table_placements: list(string)")                   \
      .Attr("table_offsets: list(int)")                         \
      .Attr("table_optimizers: list(string)")                   \
      .Attr("feature_names: list(string)")                      \
      .Attr("feature_tables: list(int)")                        \
      .Attr("feature_combiners: list(string)")                  \
      .Attr("feature_max_sequence_lengths: list(int)")          \
      .Attr("table_num_buckets: list(int) = []")                \
      .Attr("table_limits: list(float) = []")                   \
      .Attr("table_dtypes: list({float, bfloat16, half}) = []") \
      .Attr("rounding_seed: int = 0")                           \
      .Attr("out_of_range: {'error', 'drop', 'clip'} = 'error'")

#endif  // TF_LAYOUTMAP_OPS_ENGINE_ATTRS_H_
