// The rows of a table with an open vocabulary, which a kernel initializes.

#ifndef TF_LAYOUTMAP_KERNELS_VOCABULARY_LOCKED_FIRST_ROWS_H_
#define TF_LAYOUTMAP_KERNELS_VOCABULARY_LOCKED_FIRST_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/key_batches.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/vocabulary/first_rows.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// Sets the fields of `rows` except the slot variables. The shards of the table
// begin at the variable `first` of `locked`, which must be locked exclusively.
absl::Status LockFirstRows(tensorflow::OpKernelContext* ctx,
                           LockedShards* locked, int first,
                           const TableSpec& table, const FirstValues& values,
                           FirstRows* rows);

// Sets the slot variables of `rows` and their initial values. Reads the initial
// values from `slot_values`, the attribute `attr`, and increments `next_value`.
// The slot variables begin at the variable `first`, which is incremented.
absl::Status LockFirstSlots(tensorflow::OpKernelContext* ctx,
                            LockedShards* locked, int* first,
                            const TableSpec& table, const char* attr,
                            const std::vector<float>& slot_values,
                            size_t* next_value, FirstRows* rows);

// Returns the rows in flight of all tables that share a vocabulary.
RowsInFlight FindRowsInFlightOf(const HostEngine& engine,
                                const TokenSteps& tokens,
                                const RowSteps& row_steps,
                                const std::vector<int32_t>& tables);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_LOCKED_FIRST_ROWS_H_
