// Converts the bytes of a fuzzer to numbers. After the last byte, all numbers
// are zero.

#ifndef TF_LAYOUTMAP_FUZZ_INPUT_READER_H_
#define TF_LAYOUTMAP_FUZZ_INPUT_READER_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// In contrast to assert, this macro is active in every build. Without checks, a
// fuzz target would detect only crashes.
#define FUZZ_CHECK(condition)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

namespace layoutmap {

class InputReader {
 public:
  InputReader(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  template <typename T>
  T Take() {
    T value{};
    const size_t size = left_ < sizeof(T) ? left_ : sizeof(T);
    if (size > 0) std::memcpy(&value, data_, size);
    data_ += size;
    left_ -= size;
    return value;
  }

  // Reads one byte and returns a number in [0, bound). Callers use small
  // bounds, so that most inputs are valid and pass the first check.
  int64_t Below(int64_t bound) { return Take<uint8_t>() % bound; }

  // In most cases, returns a number in [0, bound). In other cases, returns any
  // 64-bit number.
  int64_t MostlyBelow(int64_t bound) {
    const uint8_t byte = Take<uint8_t>();
    if (byte >= 250) return Take<int64_t>();
    return bound > 0 ? byte % bound : byte;
  }

  template <typename T>
  std::vector<T> MostlyBelow(int64_t size, int64_t bound) {
    std::vector<T> values(size);
    for (T& value : values) value = static_cast<T>(MostlyBelow(bound));
    return values;
  }

  // Returns `size` numbers. Only the first numbers can be different from zero.
  std::vector<int64_t> State(int64_t size) {
    std::vector<int64_t> state(size, 0);
    for (int64_t i = 0; i < 8; ++i) state[Below(20)] = MostlyBelow(40);
    return state;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_FUZZ_INPUT_READER_H_
