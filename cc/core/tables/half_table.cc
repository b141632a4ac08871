#include "cc/core/tables/half_table.h"

#include <cstdint>

namespace layoutmap {
namespace {

// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t NoiseKey(uint64_t seed, uint64_t table, uint64_t step) {
  return Mix(Mix(Mix(seed) ^ table) ^ step);
}

uint64_t NoiseKeyOfRow(uint64_t noise_key, uint64_t row) {
  return Mix(noise_key ^ row);
}

}  // namespace layoutmap
