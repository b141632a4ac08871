"""Converts floats to 16-bit rows and back, with stochastic rounding."""

import numpy as np

_FORMATS = {
    # Number of discarded mantissa bits; bits of the largest finite value,
    # infinity and NaN.
    "bfloat16": (16, 0x7F7F, 0x7F80, 0x7FC0),
    "float16": (13, 0x7BFF, 0x7C00, 0x7E00),
}


def _mix(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def noise(seed: int, table: int, step: int, row: int, dim: int) -> np.ndarray:
    """Returns 32 random bits for each column of a row."""
    key = _mix(_mix(_mix(_mix(seed % 2**64) ^ table) ^ step) ^ row)
    x = np.arange(dim, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x += np.uint32(key & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x += np.uint32(key >> 32)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def expand(half: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the floats that 16-bit values represent."""
    if dtype == "bfloat16":
        return (half.astype(np.uint32) << 16).view(np.float32)
    return half.view(np.float16).astype(np.float32)


def round_by(
    values: np.ndarray, noise_bits: np.ndarray, dtype: str
) -> np.ndarray:
    """Rounds each float to one of its two neighbors in 16 bits."""
    dropped, largest, infinity, not_a_number = _FORMATS[dtype]
    found = np.zeros(values.shape, np.uint16)
    for i, (value, bits) in enumerate(
        zip(values.astype(np.float32), noise_bits.tolist())
    ):
        magnitude = abs(float(value))
        sign = 0x8000 if np.signbit(value) else 0
        if np.isnan(value):
            half = not_a_number
        elif np.isinf(value):
            half = infinity
        elif dtype == "float16" and magnitude < 2.0**-14:
            whole = int(magnitude * 2**24)
            rest = int((magnitude * 2**24 - whole) * 2**24)
            half = whole + ((bits >> 8) < rest)
        else:
            word = int(np.float32(magnitude).view(np.uint32))
            half = (word + (bits >> (32 - dropped))) >> dropped
            half -= 112 << 10 if dtype == "float16" else 0
            half = min(half, largest)
        found[i] = sign | half
    return found
