"""A step over parameter servers as lists: what goes to which server.

A batch is by feature a list of samples, a sample a list of (id, weight).
"""

import collections
import dataclasses
import struct

import numpy as np

from tests.reference import apply, unique_rows

WINDOW = 1024


@dataclasses.dataclass
class Shard:
    """A shard of a table on a server."""

    table: int
    first_row: int
    rows: np.ndarray
    slots: list[np.ndarray]


def terms(feature, samples):
    """(row, gain, place among the outputs) of each id that is used."""
    for s, sample in enumerate(samples):
        length = feature.max_sequence_length
        if length:
            for p, (row, _) in enumerate(sample[:length]):
                yield row, np.float32(1), s * length + p
            continue
        weights = np.array([w for _, w in sample], np.float32)
        gains = unique_rows.gains([0, len(sample)], weights, feature.combiner)
        for (row, _), gain in zip(sample, gains, strict=True):
            yield row, gain, s


def rows_of_shard(features, batch, shard: Shard) -> list[int]:
    """The rows of a shard that a batch needs, ascending, in its numbering."""
    needed = {
        row
        for feature, samples in zip(features, batch, strict=True)
        if feature.table == shard.table
        for row, _, _ in terms(feature, samples)
    }
    return [
        row - shard.first_row
        for row in sorted(needed)
        if 0 <= row - shard.first_row < len(shard.rows)
    ]


# How values travel: the code in a message, and what they become.
WIRES = {"float32": (0, np.float32), "bfloat16": (1, np.uint16)}


def on_wire(values, wire: str) -> np.ndarray:
    """Values as they travel: for bfloat16 the bits of the nearest one."""
    values = np.asarray(values, np.float32).ravel()
    if wire == "float32":
        return values
    found = []
    for one, bits in zip(values, values.view(np.uint32), strict=True):
        low, tie = int(bits) & 0xFFFF, 0x8000
        half = int(bits) >> 16
        if np.isnan(one):
            half = half & 0x8000 | 0x7FC0
        elif (
            np.isfinite(one)
            and (low > tie or low == tie and half % 2)
            and (half & 0x7FFF) < 0x7F7F
        ):
            half += 1
        found.append(half)
    return np.array(found, np.uint16)


def off_wire(values, wire: str) -> np.ndarray:
    """What `on_wire` gave, as float32."""
    if wire == "float32":
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def coded_rows(rows: list[int]) -> bytes:
    """Ascending rows as differences, 7 bits a byte."""
    found = []
    for last, row in zip([0, *rows], rows, strict=False):
        rest = row - last
        while rest > 127:
            found.append(rest % 128 + 128)
            rest //= 128
        found.append(rest)
    return bytes(found)


def counts(rows: list[list[int]], wire: str) -> bytes:
    """Type of values, and how many rows of each shard."""
    return np.array([WIRES[wire][0], *map(len, rows)], np.uint32).tobytes()


def fetch(rows: list[list[int]], wire: str = "float32") -> np.ndarray:
    """What a server is asked for: by shard, rows in its numbering."""
    return as_tensor(counts(rows, wire), *map(coded_rows, rows))


def fetched(
    num_updates: int,
    rows: list[list[int]],
    shards: list[Shard],
    wire: str = "float32",
) -> np.ndarray:
    """What the server answers."""
    return as_tensor(
        struct.pack("<q", num_updates),
        *(
            on_wire(shard.rows[own], wire).tobytes()
            for shard, own in zip(shards, rows, strict=True)
        ),
    )


def apply_message(
    token,
    num_updates: int,
    rows: list[list[int]],
    hyperparameters,
    gradients,
    wire: str = "float32",
) -> np.ndarray:
    """What a server is to apply; the lists are by shard."""
    return as_tensor(
        struct.pack("<4q", *token, num_updates),
        counts(rows, wire),
        *(np.asarray(one, np.float32).tobytes() for one in hyperparameters),
        *(on_wire(one, wire).tobytes() for one in gradients),
        *map(coded_rows, rows),
    )


def as_tensor(*parts: bytes) -> np.ndarray:
    """A message as the ops have it."""
    return np.frombuffer(b"".join(parts), np.uint8)


def sums(features, batch, gradients, shard: Shard) -> np.ndarray:
    """The gradient of each row of `rows_of_shard`, flat.

    Args:
      features: In their order.
      batch: Samples of each.
      gradients: Of each, `[num_outputs, dim]`.
      shard: Whose rows.
    """
    by_row = collections.defaultdict(
        lambda: np.zeros(shard.rows.shape[1], np.float32)
    )
    for feature, samples, gradient in zip(
        features, batch, gradients, strict=True
    ):
        if feature.table != shard.table:
            continue
        for row, gain, place in terms(feature, samples):
            by_row[row] = by_row[row] + gain * gradient[place]
    rows = rows_of_shard(features, batch, shard)
    return np.concatenate(
        [
            np.zeros(0, np.float32),
            *(by_row[row + shard.first_row] for row in rows),
        ]
    )


class Server:
    """Which closures it has applied, and its shards."""

    def __init__(self, shards: list[Shard], optimizers: list[str]):
        self.shards = shards
        self.optimizers = optimizers
        self.epoch = 0
        self.applied: dict[int, int] = {}  # number -> attempt
        self.num_updates = 0

    def apply(self, token, rows, gradients, hyperparameters) -> bool | None:
        """True: applied; False: it was before; None: refused.

        Args:
          token: Epoch, number, attempt.
          rows: Of each shard, in its numbering, ascending.
          gradients: Of each shard, one for each row.
          hyperparameters: Of each shard.
        """
        epoch, number, attempt = token
        if number >= 0:
            applied = self.applied if epoch == self.epoch else {}
            if epoch < self.epoch:
                return None
            oldest = next(
                n for n in range(len(applied) + 1) if n not in applied
            )
            if number >= oldest + WINDOW:
                return None
            if number in applied:
                return None if 0 != attempt == applied[number] else False
            self.epoch, self.applied = epoch, {**applied, number: attempt}
        self.num_updates += 1
        for shard, optimizer, own, by_row, values in zip(
            self.shards,
            self.optimizers,
            rows,
            gradients,
            hyperparameters,
            strict=True,
        ):
            for row, gradient in zip(own, by_row, strict=True):
                apply.step(
                    optimizer,
                    shard.rows[row],
                    [slot[row] for slot in shard.slots],
                    gradient,
                    values,
                )
        return True
