"""Reference of the C++ core's open vocabulary, with a dict and lists."""

import bisect
import collections
import itertools
import math

import numpy as np

EMPTY = -(2**63)
_MASK = 2**64 - 1


def mix(bits: int) -> int:
    """Applies the finalizer of splitmix64."""
    bits &= _MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
    return bits ^ bits >> 31


def num_buckets_for(capacity: int) -> int:
    """Returns the number of 8-row buckets, a multiple of `num_segments`."""
    needed = -(-capacity // 8)
    segments = num_segments(needed)
    return -(-needed // segments) * segments


def num_segments(num_buckets: int) -> int:
    """Returns the number of segments, the largest possible power of two.

    There are at most 64 segments, and each segment has at least 4 buckets.
    """
    segments = 1
    while segments < 64 and 8 * segments <= num_buckets:
        segments *= 2
    return segments


def overlapping(index: int, size: int, old_size: int) -> range:
    """Returns the old elements that share a 32-bit hash with a new element.

    A hash `x` is in element `x * size >> 32` of `size` elements.
    """
    first = -(-(index << 32) // size)
    last = -(-((index + 1) << 32) // size) - 1
    return range(first * old_size >> 32, (last * old_size >> 32) + 1)


class Key:
    """A key in the vocabulary, which has a row."""

    def __init__(self, key: int, row: int, last_step: int, count: int):
        self.key, self.row = key, row
        self.last_step, self.count = last_step, count


class Vocabulary:
    """Equivalent of `tf_layoutmap._native.Vocabulary` that loops over keys."""

    def __init__(
        self,
        capacity,
        *,
        admission="all",
        min_count=1,
        probability=1.0,
        evict="lru",
        half_life_steps=0,
        ttl_steps=0,
        fails_when_full=False,
        seed=0,
    ):
        self.admission, self.min_count = admission, min_count
        self.probability = probability
        self.evicts, self.half_life = evict, half_life_steps
        self.ttl, self.fails_when_full = ttl_steps, fails_when_full
        self.seed = seed
        self._set_size(capacity)

    def _set_size(self, capacity):
        self.num_buckets = num_buckets_for(capacity)
        self.num_rows = 8 * self.num_buckets
        self.per_segment = self.num_buckets // num_segments(self.num_buckets)
        # Each element is a `Key` or None.
        self.rows: list = [None] * self.num_rows
        self.known: dict[int, Key] = {}
        self.num_cells = max(16 * self.per_segment, 256)
        # Count of each (segment, row, cell).
        self.cells = collections.Counter()
        self.seen = collections.Counter()  # Sum of counts of each segment.

    def bucket(self, key: int) -> int:
        return (mix(key) >> 32) * self.num_buckets >> 32

    def places(self, key: int) -> list[int]:
        """Returns the candidate rows of a key, in probing order."""
        first = self.bucket(key)
        segment = first // self.per_segment * self.per_segment
        return [
            8 * (segment + (first - segment + probe) % self.per_segment) + lane
            for probe in range(min(4, self.per_segment))
            for lane in range(8)
        ]

    def admit(self, keys, step, oldest_in_flight, pinned_rows=()):
        """Returns the same result as the core, except the number of probes."""
        counts = collections.Counter(num_lookups=len(keys))
        before = self._copy() if self.fails_when_full else None
        # Keys are in the order of their first occurrence.
        missing: dict[int, int] = {}
        for key in keys:
            if key in self.known:
                self._count_use(self.known[key], step)
                counts["num_known"] += 1
            else:
                missing[key] = missing.get(key, 0) + 1
        new = []
        # `sorted` is stable, so keys of the same segment stay in order.
        for key in sorted(missing, key=lambda key: self._segment(key)):
            if not self._is_admitted(key, missing[key], step):
                counts["num_rejected"] += 1
                continue
            row = self._place(key, step, oldest_in_flight, pinned_rows)
            if row is None:
                counts["num_full"] += 1
                if self.fails_when_full:
                    self.__dict__.update(before)
                    raise RuntimeError(f"Key {key} has no free row")
                continue
            old = self.rows[row]
            if old is not None:
                del self.known[old.key]
                counts["num_evicted"] += 1
                counts["num_expired"] += self._is_expired(old, step)
            self.rows[row] = self.known[key] = Key(key, row, step, missing[key])
            counts["num_admitted"] += 1
            new.append((row, key, EMPTY if old is None else old.key))
        return {"rows": self.find(keys), "new": new, **counts}

    def find(self, keys) -> list[int]:
        return [
            self.known[key].row if key in self.known else -1 for key in keys
        ]

    def evict(self, keys, oldest_in_flight, pinned_rows=()) -> list[int]:
        gone = list(dict.fromkeys(key for key in keys if key in self.known))
        for key in gone:
            if self._is_in_use(self.known[key], oldest_in_flight, pinned_rows):
                raise RuntimeError(f"Key {key} cannot be evicted")
        return [self._free(self.known[key]) for key in gone]

    def evict_expired(self, step, oldest_in_flight) -> list[int]:
        return [
            self._free(one)
            for one in list(self.rows)
            if one is not None
            and self._is_expired(one, step)
            and not self._is_in_use(one, oldest_in_flight, ())
        ]

    def write(self, keys, step, last_steps=None, counts=None):
        """Returns the row of each key, or -1, and the new keys."""
        new = []
        for i, key in enumerate(keys):
            one = self.known.get(key)
            if one is None:
                row = next(
                    (row for row in self.places(key) if self.rows[row] is None),
                    None,
                )
                if row is None:
                    continue
                one = self.rows[row] = self.known[key] = Key(
                    key, row, step if last_steps is None else last_steps[i], 1
                )
                new.append(key)
            if last_steps is not None:
                one.last_step = max(one.last_step, last_steps[i])
            if counts is not None:
                one.count = counts[i]
        return self.find(keys), new

    def counts(self, keys, step) -> list[int]:
        """Returns the decayed count of each key; 0 without a row."""
        return [
            self._decayed(self.known[key], step) if key in self.known else 0
            for key in keys
        ]

    def sample(self, num_sampled, by, seed, step):
        """Returns (key, row, weight) of each sampled key, and all weights.

        Draws an element of a list that contains each key as often as its
        weight, in the order of the rows.
        """
        keys = [one for one in self.rows if one is not None]
        weights = [
            max(self._decayed(one, step), 1) if by == "count" else 1
            for one in keys
        ]
        total = sum(weights)
        if total == 0:
            return [], 0
        ends = list(itertools.accumulate(weights))
        state, sampled = mix(mix(seed[0]) ^ seed[1] & _MASK), []
        while len(sampled) < num_sampled:
            state = state + 0x9E3779B97F4A7C15 & _MASK
            product = mix(state) * total
            if product & _MASK < 2**64 % total:
                continue  # Otherwise, some numbers would be more likely.
            i = bisect.bisect_right(ends, product >> 64)
            sampled.append((keys[i].key, keys[i].row, weights[i]))
        return sampled, total

    def export(self):
        """Returns (key, row, last step, count) of each key, by row."""
        return [
            (one.key, one.row, one.last_step, one.count)
            for one in self.rows
            if one is not None
        ]

    def resize(self, capacity, step) -> list[tuple[int, int]]:
        """Returns (old row, new row) of each key that remains."""
        old = sorted(
            self.known.values(),
            key=lambda one: (-self._score(one, step), one.key),
        )
        sizes = self.num_buckets // self.per_segment, self.num_cells
        cells, seen = self.cells, self.seen
        self._set_size(capacity)
        self._move_sketch(*sizes, cells, seen)
        moves = []
        for one in old:
            row = next(
                (row for row in self.places(one.key) if self.rows[row] is None),
                None,
            )
            if row is not None:
                moves.append((one.row, row))
                self.rows[row] = self.known[one.key] = Key(
                    one.key, row, one.last_step, one.count
                )
        return moves

    def state(self) -> dict[str, np.ndarray]:
        """Returns arrays of the keys, steps and counts of all rows."""
        found = [one or Key(EMPTY, 0, 0, 0) for one in self.rows]
        return {
            "keys": np.array([one.key for one in found], np.int64),
            "last_step": np.array([one.last_step for one in found], np.int32),
            "count": np.array([one.count for one in found], np.int32),
        }

    def sketch(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cells `[segments, 2, cells]` and the sums."""
        segments = self.num_buckets // self.per_segment
        cells = np.zeros([segments, 2, self.num_cells], np.uint8)
        for place, count in self.cells.items():
            cells[place] = count
        return cells, np.array([self.seen[i] for i in range(segments)])

    def _move_sketch(self, old_segments, old_cells, cells, seen):
        """Assigns each cell the maximum of the cells that its keys had."""
        segments = self.num_buckets // self.per_segment
        origins = {
            i: overlapping(i, segments, old_segments) for i in range(segments)
        }
        for segment, old in origins.items():
            least = min(seen[one] for one in old)
            self.seen[segment] = (
                least * (self.num_cells // 2) // (old_cells // 2)
            )
        targets = collections.defaultdict(list)
        for cell in range(self.num_cells):
            for one in overlapping(cell, self.num_cells, old_cells):
                targets[one].append(cell)
        new_segments = collections.defaultdict(list)
        for segment, old in origins.items():
            for one in old:
                new_segments[one].append(segment)
        for (segment, row, cell), count in cells.items():
            for new_segment in new_segments[segment]:
                for new_cell in targets[cell]:
                    place = new_segment, row, new_cell
                    self.cells[place] = max(self.cells[place], count)

    def _segment(self, key):
        return self.bucket(key) // self.per_segment

    def _count_use(self, one, step):
        if one.last_step != step:
            one.count = self._decayed(one, step)
            one.last_step = step
        one.count += 1

    def _decayed(self, one, step):
        if not self.half_life:
            return one.count
        return one.count >> min((step - one.last_step) // self.half_life, 31)

    def _score(self, one, step):
        return (
            one.last_step if self.evicts == "lru" else self._decayed(one, step)
        )

    def _is_expired(self, one, step):
        return bool(self.ttl) and step - one.last_step > self.ttl

    def _is_in_use(self, one, oldest_in_flight, pinned_rows):
        return one.last_step >= oldest_in_flight or one.row in pinned_rows

    def _is_admitted(self, key, times, step):
        if self.admission == "count":
            return self._count_unknown(key, times) >= self.min_count
        if self.admission == "probability":
            bits = mix(mix(mix(self.seed) ^ key & _MASK) + step)
            return bits >> 32 < int(self.probability * 2**32)
        return True

    def _count_unknown(self, key, times):
        segment, bits = self._segment(key), mix(mix(key) + 0x9E3779B97F4A7C15)
        cells = [
            (segment, 0, (bits & 2**32 - 1) * self.num_cells >> 32),
            (segment, 1, (bits >> 32) * self.num_cells >> 32),
        ]
        times = min(times, 255)
        count = min(255, min(self.cells[cell] for cell in cells) + times)
        for cell in cells:
            self.cells[cell] = max(self.cells[cell], count)
        self.seen[segment] += times
        window = self.num_cells // 2
        while self.seen[segment] >= window:
            self.seen[segment] -= window
            for cell in self.cells:
                if cell[0] == segment:
                    self.cells[cell] = max(self.cells[cell] - 1, 0)
        return count

    def _place(self, key, step, oldest_in_flight, pinned_rows):
        places = self.places(key)
        free = [row for row in places if self.rows[row] is None]
        if free:
            return free[0]
        found = [
            one
            for one in (self.rows[row] for row in places)
            if not self._is_in_use(one, oldest_in_flight, pinned_rows)
        ]
        expired = [one for one in found if self._is_expired(one, step)]
        if expired:
            return min(expired, key=lambda one: (one.last_step, one.row)).row
        if not found or self.evicts == "none":
            return None
        return min(found, key=lambda one: (self._score(one, step), one.row)).row

    def _free(self, one):
        del self.known[one.key]
        self.rows[one.row] = None
        return one.row

    def _copy(self):
        rows = [
            one and Key(one.key, one.row, one.last_step, one.count)
            for one in self.rows
        ]
        return {
            "rows": rows,
            "cells": self.cells.copy(),
            "seen": self.seen.copy(),
            "known": {one.key: one for one in rows if one},
        }


class Strings:
    """Strings of the keys of a `Vocabulary`, which are hashes of strings."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._texts: dict[int, bytes] = {}
        # Number of lookups of each pair (kept string, other string).
        self.collisions = collections.Counter()

    def keep(self, keys, texts):
        """Stores the strings of keys with a row, after a step or a write."""
        for key, text in zip(keys, texts):
            kept = self._texts.get(key)
            if kept is None and key in self.vocabulary.known:
                self._texts[key] = text
            elif kept is not None and kept != text:
                self.collisions[kept, text] += 1

    def name(self, key):
        """Returns the string of a key, also after it is evicted, or None."""
        return self._texts.get(key)

    def names(self):
        """Returns the string of each key by row, or None."""
        return [self.name(key) for key, *_ in self.vocabulary.export()]


def first_values(
    kind: str, a: float, b: float, seed: int, keys, dim: int
) -> np.ndarray:
    """Returns the initial rows of keys; draws one value at a time."""
    a, b = float(np.float32(a)), float(np.float32(b))
    rows = np.empty([len(keys), dim], np.float32)
    for i, key in enumerate(keys):
        state = mix(mix(seed) ^ int(key) & _MASK)
        for c in range(dim):
            state = state + 0x9E3779B97F4A7C15 & _MASK
            rows[i, c] = _value(kind, a, b, mix(state))
    return rows


def _value(kind, a, b, bits):
    if kind == "constant":
        return a
    if kind == "uniform":
        return a + (b - a) * ((bits >> 40) / 2**24)
    symmetric = ((bits >> 12) + 0.5) * 2 / 2**52 - 1
    if kind == "truncated_normal":
        symmetric = 0.95449973610364158 * symmetric
    return a + b * (1.4142135623730951 * _inverse_erf(symmetric))


def _inverse_erf(x):
    center = (
        2.81022636e-08,
        3.43273939e-07,
        -3.5233877e-06,
        -4.39150654e-06,
        0.00021858087,
        -0.00125372503,
        -0.00417768164,
        0.246640727,
        1.50140941,
    )
    tails = (
        -0.000200214257,
        0.000100950558,
        0.00134934322,
        -0.00367342844,
        0.00573950773,
        -0.0076224613,
        0.00943887047,
        1.00167406,
        2.83297682,
    )
    w = -_log((1 - x) * (1 + x))
    coefficients, w = (center, w - 2.5) if w < 5 else (tails, math.sqrt(w) - 3)
    total = coefficients[0]
    for one in coefficients[1:]:
        total = total * w + one
    return total * x


def _log(x):
    """Computes the logarithm in the same way as the C++ core."""
    mantissa, exponent = math.frexp(x)  # `mantissa` is in [1/2, 1).
    mantissa, exponent = 2 * mantissa, exponent - 1
    root = 1.4142135623730951
    s = (mantissa - root) / (mantissa + root)
    total = 1.0 / 13
    for n in range(11, 0, -2):
        total = total * (s * s) + 1.0 / n
    return 2 * s * total + (exponent + 0.5) * 0.69314718055994531
