// Runs a lookup or an update of one stack of tables on all SparseCores of a
// TPU, as TensorFlow's ops XlaSparseDenseMatmul*WithStaticBufferSize do.
//
// Chip c has `cores_per_chip` SparseCores. The table of a chip is
// [rows_per_chip, dim] and contains one block of rows for each SparseCore.
// SparseCore s of all chips, in the order of the chips, owns the rows r with r
// % num_cores == s.

#ifndef TF_LAYOUTMAP_EMULATION_SPARSE_CORE_DEVICE_STEP_H_
#define TF_LAYOUTMAP_EMULATION_SPARSE_CORE_DEVICE_STEP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

struct DeviceSettings {
  int64_t num_chips = 1;
  int64_t cores_per_chip = 1;
  int64_t samples_per_chip = 1;
  int64_t rows_per_chip = 1;
  int64_t dim = 1;
  int64_t max_ids = 1;
  int64_t max_unique_ids = 1;
  std::string table;
};

// The buffers of one chip, which FillBuffers has written.
struct ChipIds {
  Span<const int32_t> row_pointers;
  Span<const int32_t> rows;
  Span<const int32_t> cols;
  Span<const float> gains;
  int64_t num_minibatches = 1;
};

// The ids of all chips, in the order of the buffers. The rows of the tables of
// all chips are numbered one after the other, and so are the samples.
struct DeviceIds {
  std::vector<uint32_t> rows;
  std::vector<uint32_t> samples;
  std::vector<float> gains;
};

Status CheckDeviceSettings(const DeviceSettings& settings);

// Reads and checks the buffers of all chips. The settings must be valid.
Status ReadDeviceIds(const DeviceSettings& settings,
                     const std::vector<ChipIds>& chips, DeviceIds* ids);

// Computes the activations of each chip, [samples_per_chip, dim]. The rows of a
// sample are added in the order of the buffers. If `quantization` is not null,
// each row is quantized first.
void LookUpOnDevice(const DeviceSettings& settings, const DeviceIds& ids,
                    const std::vector<const float*>& tables,
                    const Quantization* quantization, const RowKernels& kernels,
                    const ParallelFor& parallel_for,
                    const std::vector<float*>& activations);

// Updates the rows of all ids in place. The gradients of a row are added in the
// order of the chips, and on a chip in the order of the buffers. `slots` has
// the slot variables of each chip, by slot.
void UpdateOnDevice(const DeviceSettings& settings, const DeviceIds& ids,
                    const std::vector<const float*>& gradients,
                    Optimizer optimizer, Span<const float> hyperparameters,
                    const RowKernels& kernels, const ParallelFor& parallel_for,
                    const std::vector<float*>& tables,
                    const std::vector<std::vector<float*>>& slots);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_SPARSE_CORE_DEVICE_STEP_H_
