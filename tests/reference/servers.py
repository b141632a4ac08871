"""List-based reference of a step over parameter servers.

A batch contains one list of samples per feature. A sample is a list of (id,
weight) pairs.
"""

import collections
import dataclasses
import struct

import numpy as np

from tests.reference import apply, unique_rows

WINDOW = 1024


@dataclasses.dataclass
class Shard:
    """A shard of a table that a server holds."""

    table: int
    first_row: int
    rows: np.ndarray
    slots: list[np.ndarray]


def terms(feature, samples):
    """Yields (row, gain, position of the output) for each id that is used."""
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
    """Returns the sorted local rows that a batch uses in a shard."""
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


# Maps each wire format to its code in a message and the numpy dtype of values.
WIRES = {"float32": (0, np.float32), "bfloat16": (1, np.uint16)}


def on_wire(values, wire: str) -> np.ndarray:
    """Converts values to the wire format; rounds to the nearest bfloat16."""
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
    """Converts values in the wire format to float32."""
    if wire == "float32":
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def coded_rows(rows: list[int]) -> bytes:
    """Encodes the differences of ascending rows with 7 bits per byte."""
    found = []
    for last, row in zip([0, *rows], rows, strict=False):
        rest = row - last
        while rest > 127:
            found.append(rest % 128 + 128)
            rest //= 128
        found.append(rest)
    return bytes(found)


def counts(rows: list[list[int]], wire: str) -> bytes:
    """Encodes the wire format and the number of rows of each shard."""
    return np.array([WIRES[wire][0], *map(len, rows)], np.uint32).tobytes()


def fetch(rows: list[list[int]], wire: str = "float32") -> np.ndarray:
    """Returns a request to a server for local rows of its shards."""
    return as_tensor(counts(rows, wire), *map(coded_rows, rows))


def fetched(
    num_updates: int,
    rows: list[list[int]],
    shards: list[Shard],
    wire: str = "float32",
) -> np.ndarray:
    """Returns a server's response to the request of `fetch`."""
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
    """Returns a message with an update of each shard of a server."""
    return as_tensor(
        struct.pack("<4q", *token, num_updates),
        counts(rows, wire),
        *(np.asarray(one, np.float32).tobytes() for one in hyperparameters),
        *(on_wire(one, wire).tobytes() for one in gradients),
        *map(coded_rows, rows),
    )


def joined(apply: np.ndarray, fetch: np.ndarray) -> np.ndarray:
    """Returns a message with an update and a request of `fetch`."""
    return as_tensor(
        struct.pack("<q", len(apply)),
        apply.tobytes(),
        bytes(-len(apply) % 8),
        fetch.tobytes(),
    )


def bundle(requests: list[np.ndarray]) -> np.ndarray:
    """Returns a message with requests to several embeddings of a server."""
    return as_tensor(
        np.array([len(one) for one in requests], np.int64).tobytes(),
        *(one.tobytes() + bytes(-len(one) % 8) for one in requests),
    )


def as_tensor(*parts: bytes) -> np.ndarray:
    """Concatenates the parts of a message to a uint8 array."""
    return np.frombuffer(b"".join(parts), np.uint8)


def sums(features, batch, gradients, shard: Shard) -> np.ndarray:
    """Returns the summed gradients of the rows of `rows_of_shard`, flattened.

    Args:
      features: The features, in order.
      batch: The samples of each feature.
      gradients: The gradients of each feature, `[num_outputs, dim]`.
      shard: The shard that owns the rows.
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
    """A server: its shards, and a record of the applied closures."""

    def __init__(self, shards: list[Shard], optimizers: list[str]):
        self.shards = shards
        self.optimizers = optimizers
        self.epoch = 0
        self.applied: dict[int, int] = {}  # Number -> attempt.
        self.num_updates = 0

    def apply(self, token, rows, gradients, hyperparameters) -> bool | None:
        """Applies an update, and returns True if it was applied.

        Returns False if the closure was applied before, and None if the closure
        is rejected.

        Args:
          token: Epoch, number and attempt of the closure.
          rows: Local rows of each shard, in ascending order.
          gradients: Gradients of each shard, one per row.
          hyperparameters: Hyperparameters of each shard.
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
