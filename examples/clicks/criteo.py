"""Readers of the Criteo format: one sample per line, fields separated by tabs.

A line of `train.txt` has 40 fields: the label (1 for a click), 13 integers and
26 categorical values of 8 hexadecimal digits. Any feature may be blank. A line
of `test.txt` has only the 39 features. Lines are ordered by time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import tensorflow as tf
from completion.data.corpus import DataError

NUM_NUMBERS = 13
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
NUM_FEATURES = NUM_NUMBERS + len(CATEGORIES)
# Rows per distinct value. More rows than values reduce hash collisions.
_ROOM = 2


@dataclasses.dataclass(frozen=True)
class Clicks:
    """Path and statistics of a file.

    Attributes:
      path: Path of the file.
      num_training: Number of training lines, the first lines of the file.
      num_held_out: Number of held-out lines, which follow the training lines.
      num_clicks: Number of clicks in all these lines.
      num_blanks: Number of blank features in all these lines.
      num_distinct: Number of distinct training values of each category.
    """

    path: Path
    num_training: int
    num_held_out: int
    num_clicks: int
    num_blanks: int
    num_distinct: tuple[int, ...]

    @property
    def num_lines(self) -> int:
        """Number of lines that are read."""
        return self.num_training + self.num_held_out

    def table_rows(self, max_rows: int) -> list[int]:
        """Returns the number of rows of each table; row 0 is for blanks."""
        return [
            min(max_rows, 1 + _ROOM * distinct)
            for distinct in self.num_distinct
        ]


def look_through(path: Path, max_lines: int) -> Clicks:
    """Checks the format of a file and returns its statistics.

    Args:
      path: File in the format of `train.txt`.
      max_lines: Maximum number of lines to read.

    Returns:
      The statistics. The last eighth of the lines is held out.

    Raises:
      DataError: A line does not have this format. The message contains the line
        number and the reason.
    """
    lines = _read_lines(path, max_lines)
    num_training = len(lines) - len(lines) // 8
    if len(lines) < 16:
        raise DataError(
            f"--data must have at least 16 lines. Received: {path} with "
            f"{len(lines)}."
        )
    seen = [set() for _ in CATEGORIES]
    num_clicks = num_blanks = 0
    for number, line in enumerate(lines):
        label, *fields = line.split(b"\t")
        if len(fields) != NUM_FEATURES or label not in (b"0", b"1"):
            raise DataError(
                f"Each line of --data must have a label, 0 or 1, and "
                f"{NUM_FEATURES} features, separated by tabs. Received: label "
                f"{label.decode(errors='replace')[:20]!r} and {len(fields)} "
                f"features ({path}, line {number + 1})."
            )
        for field in fields[:NUM_NUMBERS]:
            if field and not _is_int64(field):
                raise DataError(
                    f"The first {NUM_NUMBERS} features of a line must be "
                    "integers of 64 bits or blank. Received: "
                    f"{field.decode(errors='replace')[:20]!r} ({path}, line "
                    f"{number + 1})."
                )
        num_clicks += label == b"1"
        num_blanks += fields.count(b"")
        if number < num_training:
            for values, field in zip(seen, fields[NUM_NUMBERS:]):
                values.add(field)
    return Clicks(
        path,
        num_training,
        len(lines) - num_training,
        num_clicks,
        num_blanks,
        tuple(len(values) for values in seen),
    )


def _is_int64(field: bytes) -> bool:
    return field.removeprefix(b"-").isdigit() and (
        len(field) < 19 or -(2**63) <= int(field) < 2**63
    )


def training_batches(
    clicks: Clicks,
    rows: list[int] | None,
    batch_size: int,
    *,
    first_epoch: int,
    epochs: int,
    seed: int,
    num_workers: int = 1,
    worker: int = 0,
) -> tf.data.Dataset:
    """Returns the batches of all remaining epochs, as features and labels.

    The order of the lines in an epoch depends only on the seed and the epoch
    index, so a resumed run sees the same batches as an uninterrupted run. An
    incomplete last batch of an epoch is dropped. A worker reads all lines, but
    parses only the lines of its own batches.
    """
    lines = tf.data.TextLineDataset(str(clicks.path)).take(clicks.num_training)
    batches = lines.take(0).batch(batch_size)
    for epoch in range(first_epoch, epochs):
        # A seed must be a number. `shuffle` raises an error for a tensor if
        # the seed of `tf.random.set_seed` is 0.
        shuffled = lines.shuffle(
            1 << 15, seed=seed + epoch, reshuffle_each_iteration=False
        )
        batches = batches.concatenate(
            shuffled.batch(batch_size, drop_remainder=True)
        )
    num_batches = (epochs - first_epoch) * (clicks.num_training // batch_size)
    return _parsed(batches, num_batches, num_workers, worker, rows)


def held_out_batches(
    clicks: Clicks,
    rows: list[int] | None,
    batch_size: int,
    num_workers: int = 1,
    worker: int = 0,
) -> tf.data.Dataset:
    """Returns batches of the held-out lines, in the order of the file."""
    lines = (
        tf.data.TextLineDataset(str(clicks.path))
        .skip(clicks.num_training)
        .take(clicks.num_held_out)
    )
    num_batches = -(-clicks.num_held_out // batch_size)
    return _parsed(
        lines.batch(batch_size), num_batches, num_workers, worker, rows
    )


def read_lines(lines: tf.Tensor, rows: list[int] | None):
    """Returns the features and labels of lines in the format of `train.txt`."""
    label, *fields = _split(lines, [[0]] + _BLANKS)
    return _features(fields, rows), tf.cast(label, tf.float32)[:, tf.newaxis]


def read_features(
    lines: tf.Tensor,
    rows: list[int] | None,
) -> dict[str, tf.Tensor]:
    """Returns the features of lines in the format of `test.txt`.

    Uses TensorFlow's own operations only, so the result can be exported.

    Args:
      lines: `[num_lines]` strings.
      rows: Number of rows of each category's table, or None to return the
        categorical values as strings.

    Returns:
      `numbers`, `[num_lines, 13]` float32, and one entry for each category: row
      ids, `[num_lines]` int64, or categorical values, `[num_lines]` strings.
    """
    return _features(_split(lines, _BLANKS), rows)


_BLANKS = [np.zeros([1], np.int64)] * NUM_NUMBERS + [[""]] * len(CATEGORIES)


def _split(lines, defaults):
    return tf.io.decode_csv(
        lines, defaults, field_delim="\t", use_quote_delim=False
    )


def _parsed(batches, num_batches, num_workers, worker, rows):
    """Returns the features and labels of each batch of a worker."""
    # In TensorFlow 2.21, deleting an iterator that autotunes can take a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    # Keras prints a warning when a dataset of unknown length ends.
    return (
        batches.apply(tf.data.experimental.assert_cardinality(num_batches))
        .shard(num_workers, worker)
        .map(lambda batch: read_lines(batch, rows), num_parallel_calls=2)
        .prefetch(4)
        .with_options(options)
    )


def _features(fields, rows):
    numbers = tf.cast(tf.stack(fields[:NUM_NUMBERS], axis=1), tf.float32)
    # The integers are counts whose magnitudes vary widely. A few integers are
    # negative. Negative values and blanks are treated as 0.
    features = {"numbers": tf.math.log1p(tf.maximum(numbers, 0))}
    if rows is None:
        # The empty string, which represents a blank, is also a key.
        return {
            **features,
            **dict(zip(CATEGORIES, fields[NUM_NUMBERS:], strict=True)),
        }
    for name, values, num_rows in zip(
        CATEGORIES, fields[NUM_NUMBERS:], rows, strict=True
    ):
        features[name] = tf.where(
            values == "",
            tf.constant(0, tf.int64),
            1 + tf.strings.to_hash_bucket_fast(values, num_rows - 1),
        )
    return features


def _read_lines(path, max_lines):
    try:
        with path.open("rb") as file:
            return [
                line.rstrip(b"\r\n") for line, _ in zip(file, range(max_lines))
            ]
    except OSError as error:
        raise DataError(
            f"--data must be a readable file. Received: {path} "
            f"({error.strerror})."
        ) from error
