// What attrs say of tables with open vocabularies.

#ifndef TF_LAYOUTMAP_KERNELS_VOCABULARY_OPEN_TABLE_SPECS_H_
#define TF_LAYOUTMAP_KERNELS_VOCABULARY_OPEN_TABLE_SPECS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

struct OpenTableSpec {
  int32_t table = 0;  // its number in the engine
  VocabularyPolicy policy;
  FirstValues values;
  bool has_unknown_row = false;
  KeyKind kind = kNoKeysYet;
};

// Refuses lists of other sizes than that of `open_tables`.
absl::Status ReadOpenTableSpecs(tensorflow::OpKernelConstruction* ctx,
                                std::vector<OpenTableSpec>* specs);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_OPEN_TABLE_SPECS_H_
