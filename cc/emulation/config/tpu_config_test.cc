#include "cc/emulation/config/tpu_config.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/config/config_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Status Parse(const std::string& text, TpuConfig* config) {
  return ParseTpuConfig({reinterpret_cast<const uint8_t*>(text.data()),
                         static_cast<int64_t>(text.size())},
                        config);
}

void ExpectRefused(const WireWriter& config, const std::string& words) {
  TpuConfig parsed;
  const Status status = Parse(config.bytes, &parsed);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find(words), std::string::npos)
      << status.message();
  EXPECT_TRUE(parsed.rules.empty());
}

// Returns a configuration with one feature and one table. `optimization`
// contains the OptimizationParameters of the table.
WireWriter ConfigWith(const WireWriter& optimization) {
  WireWriter table;
  table.Text(1, "ads").Int(2, 8).Int(3, 4).Message(5, optimization);
  return WriteSystem(1, 1).Message(1, table).Message(
      10, WriteFeature("shown", 0, {2}));
}

WireWriter ConstantRate(float rate) { return WireWriter().Float(1, rate); }

TEST(TpuConfigTest, TablesAndFeaturesAreRead) {
  TpuConfig config;
  ASSERT_TRUE(Parse(TestTpuConfig(2, 4), &config).ok());
  EXPECT_EQ(config.num_hosts, 2);
  EXPECT_EQ(config.engine.num_replicas, 4);
  EXPECT_FALSE(config.engine.is_pipelined);
  ASSERT_EQ(config.engine.tables.size(), 2);
  const TableSpec& ads = config.engine.tables[0];
  EXPECT_EQ(ads.name, "ads");
  EXPECT_EQ(ads.dim, 3);
  EXPECT_EQ(ads.optimizer, Optimizer::kAdagrad);
  EXPECT_EQ(ads.partition.offsets(), (std::vector<int64_t>{0, 6, 11}));
  EXPECT_EQ(config.engine.table_of_feature, (std::vector<int32_t>{0, 1, 0}));
  EXPECT_EQ(config.engine.features[2].feature, "shown");
  EXPECT_EQ(config.engine.features[1].num_rows, 7);
  EXPECT_EQ(config.output_shapes[1], (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(config.num_outputs(1), 8);
  EXPECT_EQ(config.outputs_per_sample(1), 2);
  EXPECT_EQ(config.rules[0].hyperparameters, (std::vector<float>{0.25f}));
}

TEST(TpuConfigTest, OptimizersAreConvertedToHyperparameters) {
  const WireWriter rate = WireWriter().Message(13, ConstantRate(0.5f));
  struct Case {
    uint32_t field;
    WireWriter rule;
    Optimizer optimizer;
    std::vector<float> numbers;
  };
  const std::vector<Case> cases = {
      {4, WireWriter(), Optimizer::kSgd, {0.5f}},
      {3, WireWriter(), Optimizer::kAdagrad, {0.5f}},
      {26,
       WireWriter().Float(1, .9f).Int(2, 1).Float(3, 2).Float(4, .75f).Float(
           5, 1e-8f),
       Optimizer::kAdagradMomentum,
       {0.5f, .9f, 1, 2, .75f, 1e-8f}},
      {6,
       WireWriter().Float(3, .9f).Float(4, .75f).Float(5, 1e-8f).Int(10, 1),
       Optimizer::kAdam,
       {0.5f, .9f, .75f, 1e-8f, 1, 1}},
      {6,
       WireWriter().Float(3, .9f).Float(4, .75f).Float(5, 1e-8f).Int(8, 1),
       Optimizer::kAdam,
       {0.5f, .9f, .75f, 1e-8f, 0, 0}},
      {5,
       WireWriter().Float(1, 1).Float(2, 2).Float(3, -.5f).Float(7, 3).Int(6,
                                                                           1),
       Optimizer::kFtrl,
       {0.5f, -.5f, 1, 2, 3, 1}},
  };
  for (const Case& one : cases) {
    TpuConfig config;
    const Status status =
        Parse(ConfigWith(WireWriter(rate).Message(one.field, one.rule)).bytes,
              &config);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(config.engine.tables[0].optimizer, one.optimizer);
    EXPECT_EQ(config.rules[0].hyperparameters, one.numbers);
  }
}

TEST(TpuConfigTest, ModifiersFollowTheHyperparameters) {
  const auto limit = [](float value) { return WireWriter().Float(1, value); };
  WireWriter optimization;
  optimization.Message(13, ConstantRate(0.5f))
      .Message(4, WireWriter())
      .Message(2, WireWriter().Message(1, limit(-3)))
      .Message(7, WireWriter().Message(1, limit(-1)).Message(2, WireWriter()))
      .Float(16, 0.125f)
      .Int(22, 1);
  TpuConfig config;
  ASSERT_TRUE(Parse(ConfigWith(optimization).bytes, &config).ok());
  EXPECT_EQ(config.rules[0].hyperparameters,
            (std::vector<float>{0.5f, -1, 0, 0.125f, 1, -3, kInfinity, 1}));
}

TEST(TpuConfigTest, ClippingRequiresAccumulation) {
  WireWriter optimization;
  optimization.Message(13, ConstantRate(0.5f))
      .Message(4, WireWriter())
      .Int(17, 2);
  TpuConfig config;
  ASSERT_TRUE(Parse(ConfigWith(optimization).bytes, &config).ok());
  EXPECT_EQ(config.rules[0].hyperparameters.back(), 0);
  optimization.Message(7, WireWriter().Message(1, WireWriter().Float(1, -1)));
  ExpectRefused(ConfigWith(optimization), "clipping requires");
}

TEST(TpuConfigTest, DynamicRatesAreCounted) {
  const auto rate = [](int64_t tag) {
    return WireWriter().Message(2, WireWriter().Int(1, tag));
  };
  WireWriter config =
      ConfigWith(WireWriter().Message(13, rate(0)).Message(4, WireWriter()));
  TpuConfig parsed;
  ASSERT_TRUE(Parse(config.bytes, &parsed).ok());
  EXPECT_EQ(parsed.num_rates, 1);
  EXPECT_EQ(parsed.rules[0].dynamic_rate, 0);
  ExpectRefused(
      ConfigWith(WireWriter().Message(13, rate(1)).Message(4, WireWriter())),
      "consecutive numbers from 0");
}

TEST(TpuConfigTest, QuantizationIsRead) {
  const auto limit = [](float value) { return WireWriter().Float(1, value); };
  WireWriter optimization;
  optimization.Message(13, ConstantRate(0.5f))
      .Message(4, WireWriter())
      .Message(
          27,
          WireWriter()
              .Int(1, 1)
              .Message(2,
                       WireWriter().Message(1, limit(-1)).Message(2, limit(1)))
              .Int(3, 5));
  TpuConfig config;
  ASSERT_TRUE(Parse(ConfigWith(optimization).bytes, &config).ok());
  ASSERT_NE(config.engine.tables[0].Quantized(), nullptr);
  EXPECT_EQ(config.engine.tables[0].Quantized()->quantum, 0.5f);
}

TEST(TpuConfigTest, UnsupportedSettingsAreRejected) {
  const WireWriter sgd =
      WireWriter().Message(13, ConstantRate(0.5f)).Message(4, WireWriter());
  ExpectRefused(ConfigWith(WireWriter().Message(9, WireWriter())),
                "Received: field 9 of OptimizationParameters");
  ExpectRefused(ConfigWith(WireWriter()), "must set an optimizer");
  ExpectRefused(ConfigWith(sgd).Int(6, 1), "sharding_strategy 1");
  ExpectRefused(ConfigWith(sgd).Int(2, 1), "must be TRAINING");
  ExpectRefused(ConfigWith(sgd).Message(11, WireWriter().Int(1, 1)),
                "one core per replica");
  ExpectRefused(
      ConfigWith(sgd).Message(1, WriteTable("ads", 3, 4, 1, kSgdField)),
      "Two tables have the name 'ads'");
  ExpectRefused(ConfigWith(sgd).Message(10, WriteFeature("f", 1, {2})),
                "Feature 'f': table_id must be in [0, 0]");
  ExpectRefused(ConfigWith(sgd).Message(10, WriteFeature("f", 0, {})),
                "at least one axis");
  ExpectRefused(
      ConfigWith(sgd).Message(10, WriteFeature("f", 0, {1 << 20, 1 << 20})),
      "an axis of input_shape");
  ExpectRefused(WriteSystem(0, 1), "num_hosts must be in [1");
  ExpectRefused(WriteSystem(1, 1 << 20), "num_tensor_cores must be in [1");
  ExpectRefused(WriteSystem(1, 1), "must describe its features");
  ExpectRefused(WriteSystem(1, 1).Message(
                    1, WriteTable("ads", int64_t{1} << 40, 4, 1, kSgdField)),
                "vocabulary_size");
}

TEST(TpuConfigTest, TruncatedConfigurationsAreRejected) {
  const std::string whole = TestTpuConfig(2, 2);
  for (size_t size = 0; size < whole.size(); ++size) {
    TpuConfig config;
    const Status status = Parse(whole.substr(0, size), &config);
    // If the bytes are truncated between two fields, the result can be a valid
    // configuration with fewer features.
    EXPECT_TRUE(!status.ok() || config.engine.features.size() < 3) << size;
    EXPECT_EQ(status.ok(), status.message().empty());
  }
}

}  // namespace
}  // namespace layoutmap
