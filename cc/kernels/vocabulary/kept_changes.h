// Changes of vocabularies that are stored until the receivers of the evicted
// keys have processed them.

#ifndef TF_LAYOUTMAP_KERNELS_VOCABULARY_KEPT_CHANGES_H_
#define TF_LAYOUTMAP_KERNELS_VOCABULARY_KEPT_CHANGES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/status.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/kernels/engine/engine_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

// The change of one vocabulary.
struct KeptChange {
  int32_t table = 0;  // index of the table in the engine
  VocabularyPolicy policy;
  // The numbers of the vocabulary (locked_vocabulary.h). If `numbers_after`
  // differs from the current numbers, the vocabulary has changed since.
  std::vector<int64_t> numbers_before;
  std::vector<int64_t> numbers_after;
  // Restores the state of the keys.
  std::function<void(const VocabularyState&)> restore;
  // Rows that were assigned to other keys, and the previous values of these
  // rows, as returned by `SaveRows`.
  std::vector<int64_t> overwritten;
  std::vector<tensorflow::Tensor> values;
  // All rows that were modified.
  std::vector<int64_t> touched;
};

// Stores `changes` in `engine` so that they can be undone. `forget_step`
// removes the step of the changes from the engine. It is called first; if it
// fails, nothing is changed. It may be empty.
//
// The op that undoes the changes must have the same inputs `state`, `shards`
// and `slots` as the op that made them. It fails, and changes nothing, if a
// vocabulary has changed since.
void KeepChanges(EngineResource* engine, std::vector<KeptChange> changes,
                 std::function<Status()> forget_step);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_KEPT_CHANGES_H_
