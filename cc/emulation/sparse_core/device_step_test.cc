#include "cc/emulation/sparse_core/device_step.h"

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/emulation/sparse_core/id_buffers.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Two chips with one SparseCore each, two samples and two rows per chip.
DeviceSettings MakeSettings() {
  DeviceSettings settings;
  settings.num_chips = 2;
  settings.samples_per_chip = 2;
  settings.rows_per_chip = 2;
  settings.max_ids = 2;
  settings.max_unique_ids = 2;
  settings.table = "ads";
  return settings;
}

// The buffers of a chip: two ids for SparseCore 0, and one for SparseCore 1.
struct Buffers {
  Buffers() : rows(16, kSparseCorePadding), cols(rows), gains(16, 0.0f) {
    rows[0] = rows[1] = rows[8] = 1;
    cols[0] = 0;
    cols[1] = 1;
    cols[8] = 0;
    gains[0] = 1.0f;
    gains[1] = 2.0f;
    gains[8] = 4.0f;
  }

  ChipIds ids() const {
    ChipIds chip;
    chip.row_pointers = pointers;
    chip.rows = rows;
    chip.cols = cols;
    chip.gains = gains;
    return chip;
  }

  std::vector<int32_t> pointers = {2, 9, 16, 16, 16, 16, 16, 16};
  std::vector<int32_t> rows;
  std::vector<int32_t> cols;
  std::vector<float> gains;
};

Status Read(const Buffers& buffers, DeviceIds* ids) {
  return ReadDeviceIds(MakeSettings(), {buffers.ids(), buffers.ids()}, ids);
}

void ExpectError(const Buffers& buffers, const std::string& words) {
  DeviceIds ids;
  const Status status = Read(buffers, &ids);
  EXPECT_NE(status.message().find(words), std::string::npos)
      << status.message();
}

TEST(DeviceStepTest, LookupsReadTheRowsOfAllChips) {
  DeviceIds ids;
  ASSERT_TRUE(Read(Buffers(), &ids).ok());
  const std::vector<float> first = {1.0f, 10.0f};
  const std::vector<float> second = {100.0f, 1000.0f};
  std::vector<float> out(4, -1.0f);
  LookUpOnDevice(MakeSettings(), ids, {first.data(), second.data()}, nullptr,
                 RowKernelsFor(CpuLevel::kBaseline), SerialFor,
                 {out.data(), out.data() + 2});
  EXPECT_EQ(out, (std::vector<float>{0.0f, 421.0f, 0.0f, 421.0f}));
}

TEST(DeviceStepTest, UpdatesSumTheGradientsOfAllChips) {
  DeviceIds ids;
  ASSERT_TRUE(Read(Buffers(), &ids).ok());
  std::vector<float> tables(4, 0.0f);
  const std::vector<float> gradients = {9.0f, 1.0f, 9.0f, 3.0f};
  const std::vector<float> learning_rate = {0.5f};
  UpdateOnDevice(MakeSettings(), ids, {gradients.data(), gradients.data() + 2},
                 Optimizer::kSgd, learning_rate,
                 RowKernelsFor(CpuLevel::kBaseline), SerialFor,
                 {tables.data(), tables.data() + 2}, {});
  EXPECT_EQ(tables, (std::vector<float>{-2.0f, -4.0f, -8.0f, 0.0f}));
}

TEST(DeviceStepTest, InvalidBuffersAreErrors) {
  Buffers buffers;
  buffers.cols[8] = 2;
  ExpectError(buffers, "row 2 of 2 rows per SparseCore (chip 0");
  buffers = Buffers();
  buffers.rows[8] = -1;
  ExpectError(buffers, "sample -1 of 2 samples");
  buffers = Buffers();
  buffers.pointers[1] = 17;
  ExpectError(buffers, "ascend to at most 16");
  buffers = Buffers();
  buffers.pointers[1] = 7;
  ExpectError(buffers, "Received: 7 after 8");
  buffers = Buffers();
  buffers.pointers[0] = 3;
  buffers.rows[2] = buffers.cols[2] = 1;
  ExpectError(buffers, "gets 3 ids and 2 unique ids");
  buffers = Buffers();
  buffers.pointers.resize(7);
  ExpectError(buffers, "must have 8 elements per minibatch");
  buffers = Buffers();
  buffers.cols.resize(8);
  ExpectError(buffers, "must have the same size");
  DeviceSettings settings = MakeSettings();
  settings.cores_per_chip = 2;
  settings.samples_per_chip = 3;
  EXPECT_FALSE(CheckDeviceSettings(settings).ok());
  settings.samples_per_chip = 4;
  settings.rows_per_chip = 3;
  EXPECT_FALSE(CheckDeviceSettings(settings).ok());
}

}  // namespace
}  // namespace layoutmap
