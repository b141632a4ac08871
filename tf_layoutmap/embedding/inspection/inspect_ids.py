"""`inspect_ids`: analyzes the ids of a dataset before training."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, files
from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.inspection import html_report, id_counts
from tf_layoutmap.embedding.spec import config, optimizer_specs
from tf_layoutmap.sharded.routing.checks import known_sizes
from tf_layoutmap.vocabulary import key_tensors
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary

if TYPE_CHECKING:
    from tf_layoutmap._core.types import (
        FeatureConfigs,
        TableConfig,
    )

# Number of slot variables of each optimizer, which all have the shape of the
# table.
_NUM_SLOTS = {
    "SGD": 0,
    "Adagrad": 1,
    "AdagradMomentum": 2,
    "Adam": 2,
    "FTRL": 2,
}


@dataclasses.dataclass(frozen=True)
class IdReport:
    """Result of `inspect_ids`.

    Attributes:
      num_batches: Number of batches that were read.
      features: Statistics of the ids of each feature, by name.
      tables: Size and lookup statistics of each table, by name.
    """

    num_batches: int
    features: dict[str, dict[str, Any]]
    tables: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain values, for JSON."""
        return dataclasses.asdict(self)

    def print(self, console: Any = None):
        """Prints the numbers as tables.

        A table that is wider than the console is split into several tables,
        which all start with the same column.

        Args:
          console: A `rich.console.Console`; None for the terminal.
        """
        # The import is local because only printing requires rich.
        from rich import console as rich_console
        from rich import table as rich_table

        console = console or rich_console.Console()
        for title, rows in (
            ("Features", html_report.feature_rows(self)),
            ("Tables", html_report.table_rows(self)),
            ("Open vocabularies", html_report.proposal_rows(self)),
        ):
            if len(rows) == 1:
                continue
            parts = html_report.split_columns(rows, console.width)
            for part in parts:
                shown = rich_table.Table(
                    title=title if part is parts[0] else f"{title}, continued"
                )
                for number, name in enumerate(part[0]):
                    # Names may be wrapped, numbers may not.
                    shown.add_column(
                        name,
                        justify="right" if number else "left",
                        no_wrap=number > 0 and len(part[0]) > 2,
                        overflow="fold",
                    )
                for row in part[1:]:
                    shown.add_row(*row)
                console.print(shown)

    def html(self) -> str:
        """Returns a self-contained page with tables and plots."""
        return html_report.page(self)

    def save_html(self, path: Any):
        """Writes `html()` to a file.

        Args:
          path: Path of the file. An existing file is replaced.

        Raises:
          OSError: If the file cannot be written. In this case, an existing file
            is not changed.
        """
        html = self.html()
        with files.replacing_file(os.fspath(path)) as new:
            pathlib.Path(new).write_text(html, encoding="utf-8")


def inspect_ids(
    dataset: Iterable[object],
    feature_config: FeatureConfigs,
    *,
    optimizer: optimizer_specs.TableOptimizer | None = None,
    max_batches: int | None = None,
    open_tables: Iterable[str | TableConfig] = (),
    kept_share: float = 0.95,
) -> IdReport:
    """Reads a dataset and reports how its ids use the tables.

    Ids outside of their tables are counted and do not raise an error.

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

    The ids of tables in `open_tables` are keys: any integers or strings. The
    report then proposes settings of an open vocabulary:

    >>> words = [["red", "fox"], ["red", "owl"], ["red", "fox"]] * 4
    >>> dataset = tf.data.Dataset.from_tensor_slices({"x": words})
    >>> report = tlm.inspect_ids(dataset, config, open_tables=["words"])
    >>> proposal = report.tables["words"]["proposal"]
    >>> proposal["capacity"], proposal["min_count"]
    (4, 1)

    Args:
      dataset: Batches: structures of `feature_config`, or tuples whose first
        element is such a structure, such as `(features, labels)`.
      feature_config: Nested structure of `FeatureConfig`.
      optimizer: Optimizer of tables whose config has no optimizer. It is used
        to compute the memory of slot variables.
      max_batches: Number of batches to read; None for all.
      open_tables: Names of tables, or their `TableConfig`, whose ids are keys.
        Each batch counts as a step.
      kept_share: Number in [0, 1]. The proposed `min_count` is the largest of
        1, 2, 3, 5 and 8 that serves at least this share of the lookups that
        would be served if each key had a row.

    Returns:
      The report. Features have `num_samples`, `num_ids`, `num_distinct` ids,
      `num_empty` samples, `num_truncated` ids after the last position of a
      sequence, `num_out_of_range` ids, `lowest_out_of_range` and
      `highest_out_of_range`, `mean_ids_per_sample` and `max_ids_per_sample`,
      `padding_waste` (the share of the positions in padded batches that hold no
      id) and `unique_ratio` (the number of distinct rows in a batch divided by
      its lookups). Tables have `num_rows`, `dim`, `num_bytes`,
      `num_slot_bytes`, `bytes_by_optimizer` (rows and slot variables with each
      optimizer), `num_lookups`, `num_distinct`, `coverage`, `hottest_rows`, and
      `share_of_hottest` for 1, 10, 100 and 1000 rows. For a table in
      `open_tables`, these numbers count keys instead of rows (a string is
      represented by its hash), and the size is computed from the `proposal`,
      which has `capacity`, `min_count`, `num_keys` with a row, `share_served`
      (the share of lookups that find a row which an earlier batch has assigned
      to their key), and `share_served_at_most` (the same share if each key had
      a row). `served_by_rows` has points (rows, share) by `min_count`.

    Raises:
      TypeError: If ids are not integers or, for a table in `open_tables`,
        strings.
      ValueError: If a batch has another structure, or `open_tables` or
        `kept_share` is invalid.
    """
    named = inputs.flatten_with_paths(feature_config)
    spec, table_configs = config.read_feature_config(named, optimizer)
    if not isinstance(kept_share, int | float) or not 0 <= kept_share <= 1:
        raise ValueError(
            checks.message("kept_share", "a number in [0, 1]", kept_share)
        )
    keys = {
        config.index_of_table(
            one, spec, table_configs, "open_tables"
        ): id_counts.KeyCounts()
        for one in open_tables
    }
    features = [
        id_counts.FeatureCounts(
            None if one.table in keys else spec.table_of(one).num_rows,
            one.max_sequence_length,
        )
        for one in spec.features
    ]
    num_batches = 0
    for batch in dataset:
        if max_batches is not None and num_batches >= max_batches:
            break
        num_batches += 1
        batch = _features_of(batch, feature_config)
        found: dict[int, list[np.ndarray]] = {table: [] for table in keys}
        for feature, counts, value in zip(
            spec.features, features, tf.nest.flatten(batch)
        ):
            ids, sizes, positions = _read_ids(
                feature, value, feature.table in keys
            )
            counts.add(ids, sizes, positions)
            if feature.table in keys:
                found[feature.table].append(ids)
        for table, ids_of_step in found.items():
            keys[table].add(np.concatenate(ids_of_step))
    return IdReport(
        num_batches,
        {
            one.name: _describe_feature(spec, one, counts)
            for one, counts in zip(spec.features, features)
        },
        {
            table.name: _describe_open_table(table, keys[index], kept_share)
            if index in keys
            else _describe_table(
                table,
                _joined(
                    [
                        counts
                        for one, counts in zip(spec.features, features)
                        if one.table == index
                    ]
                ),
            )
            for index, table in enumerate(spec.tables)
        },
    )


def _features_of(batch: Any, feature_config: Any) -> Any:
    if isinstance(batch, tuple) and not (
        isinstance(feature_config, tuple) and len(batch) == len(feature_config)
    ):
        batch = batch[0]
    inputs.check_same_structure(
        batch, "dataset", feature_config, "feature_config"
    )
    return batch


def _read_ids(feature: config.FeatureSpec, value: Any, of_keys: bool):
    """Returns ids, the number of ids per sample, and positions if sparse."""
    positions = None
    if isinstance(value, tf.RaggedTensor):
        ids, sizes = value.flat_values, value.row_lengths()
    elif isinstance(value, tf.SparseTensor):
        shape = value.dense_shape.numpy()[:-1]
        positions = value.indices.numpy()[:, -1]
        samples = (
            np.ravel_multi_index(value.indices.numpy()[:, :-1].T, shape)
            if len(value.indices)
            else np.zeros([0], np.int64)
        )
        ids, sizes = (
            value.values,
            np.bincount(samples, minlength=int(np.prod(shape))),
        )
    else:
        ids = tf.convert_to_tensor(value)
        per_sample = ids.shape[-1] if ids.shape.rank > 1 else 1
        sizes = np.full(
            math.prod(known_sizes(ids)[:-1])
            if ids.shape.rank > 1
            else len(ids),
            per_sample,
        )
        ids = tf.reshape(ids, [-1])
    if of_keys:
        ids, _ = key_tensors.of_tensor(ids)
    if not ids.dtype.is_integer:
        raise TypeError(
            f"Ids of feature {feature.name!r} must be integers"
            f"{' or strings' * of_keys}. Received: {ids.dtype.name}."
        )
    return ids.numpy(), np.asarray(sizes), positions


def _describe_feature(spec, feature, counts) -> dict[str, Any]:
    sizes = dict(zip(*(one.tolist() for one in counts.samples_of_size.items())))
    return {
        "table": spec.table_of(feature).name,
        "num_samples": counts.num_samples,
        "num_ids": counts.num_ids,
        "num_distinct": counts.rows.num_distinct,
        "num_empty": counts.num_empty,
        "num_truncated": counts.num_truncated,
        "num_out_of_range": counts.num_out_of_range,
        "lowest_out_of_range": counts.lowest_out_of_range,
        "highest_out_of_range": counts.highest_out_of_range,
        "mean_ids_per_sample": (
            counts.num_ids / counts.num_samples if counts.num_samples else 0.0
        ),
        "max_ids_per_sample": max(sizes, default=0),
        "padding_waste": counts.padding_waste,
        "unique_ratio": counts.unique_ratio,
        "samples_by_size": sizes,
    }


def _joined(features) -> id_counts.RowCounts:
    """Returns the sum of the counts of all features of a table."""
    rows = id_counts.RowCounts()
    for counts in features:
        rows.add(*counts.rows.items())
    return rows


def _describe_open_table(table, keys, kept_share) -> dict[str, Any]:
    """Returns the result of `_describe_table`, extended by a proposal."""
    found = id_counts.describe_keys(keys, kept_share)
    if found["proposal"] is not None:
        table = dataclasses.replace(
            table,
            num_rows=OpenVocabulary(found["proposal"]["capacity"]).num_rows,
        )
    rows = id_counts.RowCounts()
    rows.add(*keys.items())
    return {
        **_describe_table(table, rows),
        # Each row has a key of 8 bytes, and a step and a count of 4 bytes each.
        "num_key_bytes": 16 * table.num_rows,
        **found,
    }


def _describe_table(table, rows) -> dict[str, Any]:
    num_bytes = 4 * table.num_rows * table.dim
    return {
        "num_rows": table.num_rows,
        "dim": table.dim,
        "num_bytes": num_bytes,
        "num_slot_bytes": table.num_slot_bytes,
        "bytes_by_optimizer": {
            name: num_bytes * (1 + count) for name, count in _NUM_SLOTS.items()
        },
        "num_lookups": rows.total,
        "num_distinct": rows.num_distinct,
        "coverage": rows.num_distinct / table.num_rows,
        "hottest_rows": rows.hottest(10),
        "share_of_hottest": {
            count: rows.share_of_hottest(count) for count in (1, 10, 100, 1000)
        },
        "lookups_by_rank": _by_rank(rows.descending()),
    }


def _by_rank(lookups: np.ndarray) -> list[tuple[int, int]]:
    """Returns (rank, lookups) at ranks spaced for a logarithmic axis."""
    if not len(lookups):
        return []
    ranks = np.unique(np.geomspace(1, len(lookups), 100).astype(np.int64))
    return [(int(rank), int(lookups[rank - 1])) for rank in ranks]
