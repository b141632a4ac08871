// Reads the op attributes of tables with open vocabularies.

#ifndef TF_LAYOUTMAP_KERNELS_VOCABULARY_OPEN_TABLE_SPECS_H_
#define TF_LAYOUTMAP_KERNELS_VOCABULARY_OPEN_TABLE_SPECS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/core/served_keys/key_step.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// Attribute lists with one element per table with an open vocabulary, or per
// shard. They contain the admission and eviction policies and the initial
// values of new rows.
class OpenTableRules {
 public:
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  // Returns whether all lists have the lengths that `size` tables or shards
  // require.
  bool AreOf(size_t size) const;

  bool has_unknown_row(size_t i) const { return has_unknown_row_[i]; }

  absl::Status Get(size_t i, VocabularyPolicy* policy,
                   FirstValues* values) const;

 private:
  std::vector<bool> has_unknown_row_;
  std::vector<std::string> admissions_, evictions_, first_values_;
  std::vector<int64_t> policies_, seeds_;
  std::vector<float> limits_;
};

struct OpenTableSpec {
  // Index of the table in the engine.
  int32_t table = 0;
  // Index into the specs of the table whose vocabulary this table uses. The
  // owner of a vocabulary has its own index.
  size_t owner = 0;
  VocabularyPolicy policy;
  FirstValues values;
  bool has_unknown_row = false;
};

// Reads the specs of all tables. Returns an error if a list does not have the
// length that the tables in `open_tables` require, or if a table uses the
// vocabulary of a table that is not its owner.
absl::Status ReadOpenTableSpecs(tensorflow::OpKernelConstruction* ctx,
                                std::vector<OpenTableSpec>* specs);

// Reads the attributes `open_tables` and `has_unknown_row`. Sets `numbers` to
// the indices of the open tables, and `tables` to the settings of all
// `num_tables` tables. Returns an error if an index is invalid or repeated.
absl::Status ReadOpenTables(tensorflow::OpKernelConstruction* ctx,
                            size_t num_tables, std::vector<int32_t>* numbers,
                            std::vector<OpenTable>* tables);

// Reads the input `key_kinds`, which has one kind for each open table.
absl::Status ReadKeyKinds(tensorflow::OpKernelContext* ctx, size_t num_tables,
                          std::vector<KeyKind>* kinds);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_OPEN_TABLE_SPECS_H_
