// Test helpers that write configurations as serialized protocol buffers of
// TensorFlow.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_CONFIG_TEST_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_CONFIG_TEST_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace layoutmap {

struct WireWriter {
  std::string bytes;

  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes.push_back(static_cast<char>(value | 0x80));
    }
    bytes.push_back(static_cast<char>(value));
  }
  WireWriter& Int(uint32_t number, int64_t value) {
    Varint(uint64_t{number} << 3);
    Varint(static_cast<uint64_t>(value));
    return *this;
  }
  WireWriter& Float(uint32_t number, float value) {
    Varint(uint64_t{number} << 3 | 5);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    for (int i = 0; i < 4; ++i) {
      bytes.push_back(static_cast<char>(bits >> (8 * i)));
    }
    return *this;
  }
  WireWriter& Text(uint32_t number, const std::string& value) {
    Varint(uint64_t{number} << 3 | 2);
    Varint(value.size());
    bytes += value;
    return *this;
  }
  WireWriter& Message(uint32_t number, const WireWriter& message) {
    return Text(number, message.bytes);
  }
};

// Field numbers of optimizers in the message OptimizationParameters.
constexpr uint32_t kAdagradField = 3;
constexpr uint32_t kSgdField = 4;

inline WireWriter WriteTable(const std::string& name, int64_t num_rows,
                             int64_t dim, float rate, uint32_t rule) {
  WireWriter learning_rate, optimization, table;
  learning_rate.Float(1, rate);
  optimization.Message(13, learning_rate).Message(rule, WireWriter());
  table.Text(1, name).Int(2, num_rows).Int(3, dim).Message(5, optimization);
  return table;
}

inline WireWriter WriteFeature(const std::string& name, int64_t table,
                               const std::vector<int64_t>& shape) {
  WireWriter packed, feature;
  for (const int64_t size : shape) packed.Varint(size);
  return feature.Text(1, name).Int(2, table).Text(3, packed.bytes);
}

inline WireWriter WriteSystem(int64_t num_hosts, int64_t num_cores,
                              bool is_pipelined = false) {
  WireWriter config;
  return config.Int(2, 2)
      .Int(4, num_hosts)
      .Int(5, num_cores)
      .Int(7, is_pipelined);
}

// Returns a configuration with two tables and three features. The table `ads`
// is trained with Adagrad and has the features `clicked` and `shown`. The table
// `words` is trained with SGD and has the sequence feature `text`.
inline std::string TestTpuConfig(int64_t num_hosts, int64_t num_cores,
                                 int64_t num_samples = 4,
                                 bool is_pipelined = false) {
  return WriteSystem(num_hosts, num_cores, is_pipelined)
      .Message(1, WriteTable("ads", 11, 3, 0.25f, kAdagradField))
      .Message(1, WriteTable("words", 7, 5, 0.25f, kSgdField))
      .Message(10, WriteFeature("clicked", 0, {num_samples}))
      .Message(10, WriteFeature("text", 1, {num_samples, 2}))
      .Message(10, WriteFeature("shown", 0, {num_samples}))
      .bytes;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_CONFIG_TEST_H_
