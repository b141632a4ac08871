// What an op has changed in vocabularies, kept until those who are told which
// keys went have taken it.

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
  int32_t table = 0;  // its number in the engine
  VocabularyPolicy policy;
  // The numbers of the vocabulary (locked_vocabulary.h). Those after the change
  // tell whether there was another one since.
  std::vector<int64_t> numbers_before;
  std::vector<int64_t> numbers_after;
  // Makes the state of keys what it was.
  std::function<void(const VocabularyState&)> restore;
  // Rows that others got, and what they held before, as of `SaveRows`.
  std::vector<int64_t> overwritten;
  std::vector<tensorflow::Tensor> values;
  // All rows that the change has touched.
  std::vector<int64_t> touched;
};

// Lets `engine` take these changes back. `forget_step` takes the step that they
// belong to out of the engine; it is called first, and nothing is changed if it
// fails. It may be empty.
//
// The op that takes back must have the variables of the op that made the
// changes as its inputs `state`, `shards` and `slots`. It fails, and changes
// nothing, if a vocabulary was changed since.
void KeepChanges(EngineResource* engine, std::vector<KeptChange> changes,
                 std::function<Status()> forget_step);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_KEPT_CHANGES_H_
