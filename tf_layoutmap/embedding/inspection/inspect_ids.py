"""`inspect_ids`: what a dataset asks of its tables, before it is trained on."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.inspection import html_report, id_counts
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import structure
from tf_layoutmap.sharded.routing.shards import known_sizes

# Slot variables of each optimizer: so many times the rows again.
_NUM_SLOTS = {"SGD": 0, "Adagrad": 1, "AdagradMomentum": 2, "Adam": 2,
              "FTRL": 2}


@dataclasses.dataclass(frozen=True)
class IdReport:
    """What `inspect_ids` found.

    Attributes:
      num_batches: Batches that were read.
      features: By name, what its ids look like.
      tables: By name, its size and how often its rows are looked up.
    """

    num_batches: int
    features: dict[str, dict[str, Any]]
    tables: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain values, for JSON."""
        return dataclasses.asdict(self)

    def print(self, console: Any = None):
        """Prints two tables.

        Args:
          console: A `rich.console.Console`; None for the terminal.
        """
        # Imported here: the numbers alone do not need rich.
        from rich import console as rich_console
        from rich import table as rich_table

        console = console or rich_console.Console()
        for title, rows in (("Features", html_report.feature_rows(self)),
                            ("Tables", html_report.table_rows(self))):
            shown = rich_table.Table(title=title)
            for name in rows[0]:
                shown.add_column(
                    name, justify="left" if name == rows[0][0] else "right")
            for row in rows[1:]:
                shown.add_row(*row)
            console.print(shown)

    def html(self) -> str:
        """Returns a page with tables and plots that loads nothing else."""
        return html_report.page(self)

    def save_html(self, path: Any):
        """Writes `html()` to a file."""
        pathlib.Path(path).write_text(self.html(), encoding="utf-8")


def inspect_ids(
    dataset: Iterable[Any], feature_config: Any, *, optimizer: Any = None,
    max_batches: int | None = None,
) -> IdReport:
    """Reads a dataset and tells how its ids use the tables.

    Ids outside their tables are counted, not refused: to find them is what
    this is for.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> config = {"x": tpu.FeatureConfig(tpu.TableConfig(4, 8, name="words"))}
    >>> dataset = tf.data.Dataset.from_tensors({"x": [[1, 1], [1, 9]]})
    >>> report = tlm.inspect_ids(dataset, config)
    >>> report.features["x"]["num_out_of_range"]
    1
    >>> report.tables["words"]["hottest_rows"]
    [(1, 3)]

    Args:
      dataset: Batches: structures of `feature_config`, or tuples that start
        with one, as `(features, labels)`.
      feature_config: Nested structure of `FeatureConfig`.
      optimizer: Of tables that bring none, for their memory.
      max_batches: How many batches to read; None for all.

    Returns:
      The numbers. Of features: `num_samples`, `num_ids`, `num_distinct`,
      `num_empty` samples, `num_truncated` ids behind a sequence's last
      position, `num_out_of_range` with the `lowest_` and `highest_`, mean and
      largest `ids_per_sample`, `padding_waste` (the part of padded batches
      that would be empty) and `unique_ratio` (distinct rows of a batch over
      its lookups). Of tables: `num_rows`, `dim`, `num_bytes`,
      `num_slot_bytes`, `bytes_by_optimizer` (rows and slot variables, had the
      table that optimizer), `num_lookups`, `num_distinct`, `coverage`,
      `hottest_rows`, and `share_of_hottest` 1, 10, 100 and 1000 rows.

    Raises:
      TypeError: If ids are not integers.
      ValueError: If a batch has another structure.
    """
    named = structure.flatten_with_paths(feature_config)
    spec, _ = config.read_feature_config(named, optimizer)
    features = [id_counts.FeatureCounts(
        spec.table_of(one).num_rows, one.max_sequence_length)
        for one in spec.features]
    num_batches = 0
    for batch in dataset:
        if max_batches is not None and num_batches >= max_batches:
            break
        num_batches += 1
        batch = _features_of(batch, feature_config)
        for feature, counts, value in zip(
                spec.features, features, tf.nest.flatten(batch)):
            counts.add(*_read_ids(feature, value))
    return IdReport(
        num_batches,
        {one.name: _describe_feature(spec, one, counts)
         for one, counts in zip(spec.features, features)},
        {table.name: _describe_table(table, [
            counts for one, counts in zip(spec.features, features)
            if spec.table_of(one) is table]) for table in spec.tables})


def _features_of(batch: Any, feature_config: Any) -> Any:
    if isinstance(batch, tuple) and not (
            isinstance(feature_config, tuple)
            and len(batch) == len(feature_config)):
        batch = batch[0]
    structure.check_same(batch, "dataset", feature_config, "feature_config")
    return batch


def _read_ids(feature: config.FeatureSpec, value: Any):
    """The ids, how many each sample has, and sparse ones' positions."""
    positions = None
    if isinstance(value, tf.RaggedTensor):
        ids, sizes = value.flat_values, value.row_lengths()
    elif isinstance(value, tf.SparseTensor):
        shape = value.dense_shape.numpy()[:-1]
        positions = value.indices.numpy()[:, -1]
        samples = np.ravel_multi_index(
            value.indices.numpy()[:, :-1].T, shape) if len(
                value.indices) else np.zeros([0], np.int64)
        ids, sizes = value.values, np.bincount(
            samples, minlength=int(np.prod(shape)))
    else:
        ids = tf.convert_to_tensor(value)
        per_sample = ids.shape[-1] if ids.shape.rank > 1 else 1
        sizes = np.full(math.prod(known_sizes(ids)[:-1]) if ids.shape.rank > 1
                        else len(ids), per_sample)
        ids = tf.reshape(ids, [-1])
    if not ids.dtype.is_integer:
        raise TypeError(
            f"Ids of feature {feature.name!r} must be integers. Received: "
            f"{ids.dtype.name}.")
    return ids.numpy(), np.asarray(sizes), positions


def _describe_feature(spec, feature, counts) -> dict[str, Any]:
    sizes = dict(zip(*(
        one.tolist() for one in counts.samples_of_size.items())))
    return {
        "table": spec.table_of(feature).name,
        "num_samples": counts.num_samples, "num_ids": counts.num_ids,
        "num_distinct": counts.rows.num_distinct,
        "num_empty": counts.num_empty,
        "num_truncated": counts.num_truncated,
        "num_out_of_range": counts.num_out_of_range,
        "lowest_out_of_range": counts.lowest_out_of_range,
        "highest_out_of_range": counts.highest_out_of_range,
        "mean_ids_per_sample": (
            counts.num_ids / counts.num_samples if counts.num_samples
            else 0.0),
        "max_ids_per_sample": max(sizes, default=0),
        "padding_waste": counts.padding_waste,
        "unique_ratio": counts.unique_ratio,
        "samples_by_size": sizes,
    }


def _describe_table(table, features) -> dict[str, Any]:
    rows = id_counts.RowCounts()
    for counts in features:
        rows.add(*counts.rows.items())
    num_bytes = 4 * table.num_rows * table.dim
    return {
        "num_rows": table.num_rows, "dim": table.dim,
        "num_bytes": num_bytes, "num_slot_bytes": table.num_slot_bytes,
        "bytes_by_optimizer": {name: num_bytes * (1 + count)
                               for name, count in _NUM_SLOTS.items()},
        "num_lookups": rows.total, "num_distinct": rows.num_distinct,
        "coverage": rows.num_distinct / table.num_rows,
        "hottest_rows": rows.hottest(10),
        "share_of_hottest": {
            count: rows.share_of_hottest(count)
            for count in (1, 10, 100, 1000)},
        "lookups_by_rank": _by_rank(rows.descending()),
    }


def _by_rank(lookups: np.ndarray) -> list[tuple[int, int]]:
    """(rank, lookups) at ranks that a logarithmic axis can show."""
    if not len(lookups):
        return []
    ranks = np.unique(np.geomspace(1, len(lookups), 100).astype(np.int64))
    return [(int(rank), int(lookups[rank - 1])) for rank in ranks]
