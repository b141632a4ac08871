// Stores changes of vocabularies, so that a program can undo a change if the
// receivers of the evicted keys fail.

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

// A change of one table with an open vocabulary.
struct KeptChange {
  // Index of the table in the engine.
  int32_t table = 0;
  // Whether the table owns its vocabulary. Otherwise only the rows of the table
  // have changed, and the fields about the vocabulary are empty.
  bool owns_vocabulary = true;
  VocabularyPolicy policy;
  // The numbers of the vocabulary (locked_vocabulary.h) before and after the
  // change. If the current numbers differ from `numbers_after`, the vocabulary
  // has changed again.
  std::vector<int64_t> numbers_before;
  std::vector<int64_t> numbers_after;
  // Restores the keys, the last steps and the counts to the state before the
  // change.
  std::function<void(const VocabularyState&)> restore;
  // The rows that were assigned to other keys, and the previous values of these
  // rows, which `SaveRows` returned.
  std::vector<int64_t> overwritten;
  std::vector<tensorflow::Tensor> values;
  // All rows that the change modified.
  std::vector<int64_t> touched;
};

// Stores `changes` in `engine`, so that an op can undo them. The op first calls
// `forget_step`, which removes the step of the changes from the engine. If
// `forget_step` returns an error, the op changes nothing. `forget_step` may be
// empty.
//
// The op that undoes the changes must have the same inputs `state`, `shards`
// and `slots` as the op that changed the vocabularies. If a vocabulary has
// changed again, the op returns an error and changes nothing.
void KeepChanges(EngineResource* engine, std::vector<KeptChange> changes,
                 std::function<Status()> forget_step);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_KEPT_CHANGES_H_
