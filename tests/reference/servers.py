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
    needed = {row for feature, samples in zip(features, batch, strict=True)
              if feature.table == shard.table
              for row, _, _ in terms(feature, samples)}
    return [row - shard.first_row for row in sorted(needed)
            if 0 <= row - shard.first_row < len(shard.rows)]


def words(features, batch, shards: list[Shard]) -> np.ndarray:
    """What a server is asked for: counts, then rows."""
    rows = [rows_of_shard(features, batch, shard) for shard in shards]
    return np.array([*map(len, rows), *sum(rows, [])], np.uint32)


def fetched(num_updates: int, request, shards: list[Shard]) -> np.ndarray:
    """What the server answers."""
    counts, rows = request[:len(shards)], request[len(shards):]
    parts = [np.frombuffer(struct.pack("<q", num_updates), np.float32)]
    for shard, own in zip(shards, np.split(rows, np.cumsum(counts)[:-1]),
                          strict=True):
        parts.append(shard.rows[own].astype(np.float32).ravel())
    return np.concatenate(parts)


def sums(features, batch, gradients, shard: Shard) -> np.ndarray:
    """The gradient of each row of `rows_of_shard`, flat.

    Args:
      features: In their order.
      batch: Samples of each.
      gradients: Of each, `[num_outputs, dim]`.
      shard: Whose rows.
    """
    by_row = collections.defaultdict(
        lambda: np.zeros(shard.rows.shape[1], np.float32))
    for feature, samples, gradient in zip(
            features, batch, gradients, strict=True):
        if feature.table != shard.table:
            continue
        for row, gain, place in terms(feature, samples):
            by_row[row] = by_row[row] + gain * gradient[place]
    rows = rows_of_shard(features, batch, shard)
    return np.concatenate([np.zeros(0, np.float32), *(
        by_row[row + shard.first_row] for row in rows)])


def header(token, num_updates: int) -> np.ndarray:
    """The words before the rows of an apply."""
    return np.frombuffer(struct.pack("<4q", *token, num_updates), np.uint32)


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
            oldest = next(n for n in range(len(applied) + 1)
                          if n not in applied)
            if number >= oldest + WINDOW:
                return None
            if number in applied:
                return None if 0 != attempt == applied[number] else False
            self.epoch, self.applied = epoch, {**applied, number: attempt}
        self.num_updates += 1
        for shard, optimizer, own, by_row, values in zip(
                self.shards, self.optimizers, rows, gradients,
                hyperparameters, strict=True):
            for row, gradient in zip(own, by_row, strict=True):
                apply.step(optimizer, shard.rows[row],
                           [slot[row] for slot in shard.slots], gradient,
                           values)
        return True
