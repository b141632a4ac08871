"""`inspect_ids`: analyzes the ids of a dataset before training."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, files
from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.configs import config, optimizer_specs
from tf_layoutmap.embedding.inspection import (
    html_report,
    id_counts,
    sparse_core_limits,
)
from tf_layoutmap.embedding.inspection.sparse_core_limits import (
    SparseCoreLimits,
    SparseCores,
)
from tf_layoutmap.sharded.routing.checks import known_sizes
from tf_layoutmap.vocabulary import key_tensors
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary

if TYPE_CHECKING:
    from rich.console import Console

    from tf_layoutmap._core.types import (
        FeatureConfigs,
        TableConfig,
    )

# Number of slot variables of each optimizer. Each slot variable has the shape
# of the table.
_NUM_SLOTS = {
    "SGD": 0,
    "Adagrad": 1,
    "AdagradMomentum": 2,
    "Adam": 2,
    "FTRL": 2,
}


@dataclasses.dataclass(frozen=True)
class IdReport:
    """Report on the ids of a dataset, which `tlm.inspect_ids` returns.

    Attributes:
      num_batches: Number of batches that were read.
      features: Statistics of the ids of each feature, by name.
      tables: Size and lookup statistics of each table, by name.
      sparse_cores: Numbers of ids that SparseCores exchange in each batch, by
        the number of SparseCores. Empty if `tlm.inspect_ids` was called without
        `sparse_cores`. `sparse_core_limits` computes limits from the numbers.
    """

    num_batches: int
    features: dict[str, dict[str, object]]
    tables: dict[str, dict[str, object]]
    sparse_cores: dict[int, dict[str, object]] = dataclasses.field(
        default_factory=dict
    )

    def to_dict(self) -> dict[str, object]:
        """Returns the report as a dict that JSON can represent."""
        return dataclasses.asdict(self)

    def print(self, console: Console | None = None) -> None:
        """Prints the numbers as tables.

        If a table is wider than the console, it is split into several tables.
        All of these tables start with the same column.

        Args:
          console: A `rich.console.Console`, or None for the terminal.
        """
        # `rich` is imported here, because only this method requires it.
        from rich import console as rich_console
        from rich import table as rich_table

        console = console or rich_console.Console()
        for title, rows in (
            ("Features", html_report.feature_rows(self)),
            ("Tables", html_report.table_rows(self)),
            ("Open vocabularies", html_report.proposal_rows(self)),
            ("SparseCores", html_report.sparse_core_rows(self)),
        ):
            if len(rows) == 1:
                continue
            parts = html_report.split_columns(rows, console.width)
            for part in parts:
                shown = rich_table.Table(
                    title=title if part is parts[0] else f"{title}, continued"
                )
                for number, name in enumerate(part[0]):
                    # Names can be split over several lines. Numbers are never
                    # split.
                    shown.add_column(
                        name,
                        justify="right" if number else "left",
                        no_wrap=number > 0 and len(part[0]) > 2,
                        overflow="fold",
                    )
                for row in part[1:]:
                    shown.add_row(*row)
                console.print(shown)

    def sparse_core_limits(
        self, *, num_cores: int | None = None, confidence: float = 1.0
    ) -> SparseCoreLimits:
        """Returns id limits for TensorFlow's `TPUEmbeddingV2`.

        A step of `TPUEmbeddingV2` fails if a batch has more ids than a limit,
        and large limits use memory of the TPU. The limits are exact for the
        batches that were read. Batches that were not read can exceed them: if
        the batches are independent, the next batch exceeds the maximum of `n`
        batches with a probability of at most `1 / (n + 1)` per limit.

        >>> import tensorflow as tf
        >>> import tf_layoutmap as tlm
        >>> tpu = tf.tpu.experimental.embedding
        >>> words = tpu.TableConfig(64, 8, optimizer=tpu.SGD(0.1), name="words")
        >>> ids = tf.ragged.constant([[0, 2], [4], [5], [6, 6]] * 2)
        >>> report = tlm.inspect_ids(
        ...     [{"x": ids}],
        ...     {"x": tpu.FeatureConfig(words)},
        ...     sparse_cores=tlm.planning.SparseCores(2, cores_per_chip=2),
        ... )
        >>> limits = report.sparse_core_limits()
        >>> limits.max_ids_per_table, limits.max_unique_ids_per_table
        ({'words': 4}, {'words': 4})
        >>> config = tpu.SparseCoreEmbeddingConfig(
        ...     max_ids_per_chip_per_sample=limits.max_ids_per_chip_per_sample,
        ...     max_ids_per_table=limits.max_ids_per_table,
        ...     max_unique_ids_per_table=limits.max_unique_ids_per_table,
        ... )

        Args:
          num_cores: Number of SparseCores of all chips; one of the numbers
            passed to `tlm.inspect_ids`. Required if several numbers were
            passed.
          confidence: Share of the batches that do not exceed a limit, in
            (0, 1]. The value applies to each limit. `overflow_share` is the
            share of the batches that exceed any limit.

        Raises:
          ValueError: If `num_cores` was not passed to `tlm.inspect_ids`, if
            `confidence` is invalid, or if the dataset had no batches.
        """
        if num_cores is None and len(self.sparse_cores) == 1:
            (num_cores,) = self.sparse_cores
        if num_cores not in self.sparse_cores:
            raise ValueError(
                checks.message(
                    "num_cores",
                    "the number of cores of a SparseCores that was passed to "
                    f"tlm.inspect_ids, {list(self.sparse_cores)}",
                    num_cores,
                )
            )
        if (
            not isinstance(confidence, int | float)
            or isinstance(confidence, bool)
            or not 0 < confidence <= 1
        ):
            raise ValueError(
                checks.message("confidence", "a number in (0, 1]", confidence)
            )
        if not self.num_batches:
            raise ValueError("The dataset must have at least one batch.")
        stacks: Any = self.sparse_cores[num_cores]["stacks"]
        return sparse_core_limits.limits_of(stacks, confidence)

    def html(self) -> str:
        """Returns an HTML page that contains all tables and plots."""
        return html_report.page(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the HTML page to a file.

        Args:
          path: Path of the file. An existing file is replaced.

        Raises:
          OSError: If the file cannot be written. After this error, an existing
            file is unchanged.
        """
        files.write_text(path, self.html())


def inspect_ids(
    dataset: Iterable[object],
    feature_config: FeatureConfigs,
    *,
    optimizer: optimizer_specs.TableOptimizer | None = None,
    max_batches: int | None = None,
    open_tables: Iterable[str | TableConfig] = (),
    relative_hit_rate: float = 0.95,
    sparse_cores: SparseCores | Iterable[SparseCores] = (),
) -> IdReport:
    """Reads a dataset, and reports how its ids use the tables.

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

    The ids of tables in `open_tables` are keys, which can be any integers or
    strings. For these tables, the report proposes settings of an open
    vocabulary:

    >>> words = [["red", "fox"], ["red", "owl"], ["red", "fox"]] * 4
    >>> dataset = tf.data.Dataset.from_tensor_slices({"x": words})
    >>> report = tlm.inspect_ids(dataset, config, open_tables=["words"])
    >>> proposal = report.tables["words"]["proposal"]
    >>> proposal["capacity"], proposal["min_count"]
    (4, 1)

    Args:
      dataset: Iterable of batches. A batch has the structure of
        `feature_config`, or is a tuple such as `(features, labels)` whose first
        element has this structure.
      feature_config: Nested structure of `FeatureConfig`.
      optimizer: Optimizer of tables whose config has no optimizer. The
        optimizer determines the size of the slot variables in the report.
      max_batches: Number of batches to read, or None to read all batches.
      open_tables: Tables whose ids are keys, as names or `TableConfig` objects.
        Each batch counts as a step.
      relative_hit_rate: Number in [0, 1]. The proposed `min_count` is the
        largest of 1, 2, 3, 5 and 8 whose hit rate is at least
        `relative_hit_rate` times the hit rate with `min_count=1`.
      sparse_cores: SparseCores for which `IdReport.sparse_core_limits` computes
        limits, as one `tlm.planning.SparseCores` or as several with different
        numbers of cores. As in `TPUEmbeddingV2`, each element of a dense tensor
        is a sample, and ids are not checked.

    Returns:
      The report. `features` contains a dict for each feature. The dict includes
      these keys:

      - `num_samples`, `num_ids`, `num_distinct`: Numbers of samples, ids and
        distinct ids.
      - `num_empty`: Number of samples without ids.
      - `num_truncated`: Number of ids after the last position of a sequence.
      - `num_out_of_range`, `lowest_out_of_range`, `highest_out_of_range`:
        Number, minimum and maximum of the ids outside of the table.
      - `mean_ids_per_sample`, `max_ids_per_sample`: Mean and maximum of the
        number of ids per sample.
      - `padding_waste`: Share of empty positions in padded batches.
      - `unique_ratio`: Number of distinct rows in each batch, summed over all
        batches, divided by the number of lookups.

      `tables` contains a dict for each table. The dict includes these keys:

      - `num_rows`, `dim`: Size of the table.
      - `num_bytes`, `num_slot_bytes`: Memory of the rows and of the slot
        variables.
      - `bytes_by_optimizer`: Total memory of the rows and the slot variables,
        for each of TensorFlow's optimizers.
      - `num_lookups`, `num_distinct`: Number of lookups, and number of distinct
        rows that were looked up.
      - `mean_unique_per_batch`: Mean number of distinct rows in a batch, over
        all features of the table.
      - `coverage`: Share of the rows that were looked up.
      - `hottest_rows`: The 10 rows with the most lookups, and their lookup
        counts.
      - `share_of_hottest`: Share of the lookups that read the 1, 10, 100 and
        1000 hottest rows.

      For a table in `open_tables`, these numbers count keys instead of rows. A
      string is represented by its hash. The sizes are computed from the
      proposed capacity. The dict of a table in `open_tables` also contains:

      - `proposal`: Dict with the proposed `capacity` and `min_count`, and with
        `num_keys`, the number of keys that get a row. The dict also contains
        `hit_rate`, the share of lookups whose key got a row in an earlier
        batch, and `max_hit_rate`, the value of `hit_rate` if all
        keys got a row.
      - `hit_rate_by_rows`: For each `min_count`, a list of points (number of
        rows, share of served lookups).

    Raises:
      TypeError: If ids are not integers. For a table in `open_tables`, ids can
        also be strings.
      ValueError: If a batch has another structure, or if `open_tables`,
        `relative_hit_rate` or `sparse_cores` is invalid. Also if the
        SparseCores do not divide the number of samples of the first batch, or
        if a later batch has more samples.
    """
    named = inputs.flatten_with_paths(feature_config)
    spec, table_configs = config.read_feature_config(named, optimizer)
    if (
        not isinstance(relative_hit_rate, int | float)
        or not 0 <= relative_hit_rate <= 1
    ):
        raise ValueError(
            checks.message(
                "relative_hit_rate", "a number in [0, 1]", relative_hit_rate
            )
        )
    keys = {
        config.index_of_table(
            table, spec, table_configs, "open_tables"
        ): id_counts.KeyCounts()
        for table in open_tables
    }
    features = [
        id_counts.FeatureCounts(
            None if feature.table in keys else spec.table_of(feature).num_rows,
            feature.max_sequence_length,
        )
        for feature in spec.features
    ]
    counters = _stack_counters(
        sparse_cores, spec, table_configs, optimizer, bool(keys)
    )
    num_batches = 0
    num_unique = [0] * len(spec.tables)
    for batch in dataset:
        if max_batches is not None and num_batches >= max_batches:
            break
        num_batches += 1
        batch = _features_of(batch, feature_config)
        ids_by_table: list[list[np.ndarray]] = [[] for _ in spec.tables]
        ids_and_samples = []
        for feature, counts, value in zip(
            spec.features, features, tf.nest.flatten(batch)
        ):
            ids, sizes, positions = _read_ids(
                feature, value, feature.table in keys
            )
            counts.add(ids, sizes, positions)
            ids_by_table[feature.table].append(ids)
            if counters:
                ids_and_samples.append(_with_samples(value, ids, sizes))
        for counter in counters.values():
            counter.add(ids_and_samples)
        for table, ids_of_step in enumerate(ids_by_table):
            all_ids = np.concatenate(ids_of_step)
            unique = np.unique(all_ids)
            if table in keys:
                keys[table].add(all_ids)
            else:
                num_rows = spec.tables[table].num_rows
                unique = unique[(unique >= 0) & (unique < num_rows)]
            num_unique[table] += len(unique)
    return IdReport(
        num_batches,
        {
            feature.name: _describe_feature(spec, feature, counts)
            for feature, counts in zip(spec.features, features)
        },
        {
            table.name: {
                **(
                    _describe_open_table(table, keys[index], relative_hit_rate)
                    if index in keys
                    else _describe_table(
                        table,
                        _joined(
                            [
                                counts
                                for feature, counts in zip(
                                    spec.features, features
                                )
                                if feature.table == index
                            ]
                        ),
                    )
                ),
                "mean_unique_per_batch": num_unique[index]
                / max(num_batches, 1),
            }
            for index, table in enumerate(spec.tables)
        },
        {
            num_cores: counter.description()
            for num_cores, counter in counters.items()
        },
    )


def _stack_counters(
    sparse_cores: Any, spec: Any, table_configs: Any, optimizer: Any, keys: bool
) -> dict[int, sparse_core_limits.StackCounter]:
    """Returns the counters of SparseCores, by the number of cores."""
    if isinstance(sparse_cores, SparseCores):
        sparse_cores = [sparse_cores]
    counters: dict[int, sparse_core_limits.StackCounter] = {}
    for cores in sparse_cores:
        checks.check_type(
            "sparse_cores", cores, SparseCores, "tlm.planning.SparseCores"
        )
        if keys:
            raise ValueError(
                "Argument `sparse_cores` must be empty if `open_tables` are "
                "passed, because keys have no rows before training."
            )
        if cores.num_cores in counters:
            raise ValueError(
                checks.message(
                    "sparse_cores",
                    "objects with different numbers of cores",
                    list(sparse_cores),
                )
            )
        counters[cores.num_cores] = sparse_core_limits.StackCounter(
            cores, spec, table_configs, optimizer
        )
    return counters


def _with_samples(
    value: Any, ids: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the ids, the sample of each id, and the number of samples."""
    if isinstance(value, tf.RaggedTensor):
        return ids, np.repeat(np.arange(len(sizes)), sizes), len(sizes)
    if isinstance(value, tf.SparseTensor):
        return ids, _samples_of_sparse(value), len(sizes)
    # As in `TPUEmbeddingV2`, each element is a sample.
    return ids, np.arange(len(ids)), len(ids)


def _samples_of_sparse(value: Any) -> np.ndarray:
    """Returns the index of the sample of each value of a sparse tensor."""
    if not len(value.indices):
        return np.zeros([0], np.int64)
    shape = value.dense_shape.numpy()[:-1]
    return np.ravel_multi_index(value.indices.numpy()[:, :-1].T, shape)


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
    """Returns ids, numbers of ids per sample, and positions of sparse ids."""
    positions = None
    if isinstance(value, tf.RaggedTensor):
        ids, sizes = value.flat_values, value.row_lengths()
    elif isinstance(value, tf.SparseTensor):
        shape = value.dense_shape.numpy()[:-1]
        positions = value.indices.numpy()[:, -1]
        ids, sizes = (
            value.values,
            np.bincount(
                _samples_of_sparse(value), minlength=int(np.prod(shape))
            ),
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
    sizes = dict(
        zip(*(array.tolist() for array in counts.samples_of_size.items()))
    )
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
    """Returns the summed lookup counts of all features of a table."""
    rows = id_counts.RowCounts()
    for counts in features:
        rows.add(*counts.rows.items())
    return rows


def _describe_open_table(table, keys, relative_hit_rate) -> dict[str, Any]:
    """Returns the description of a table and proposed settings."""
    description = id_counts.describe_keys(keys, relative_hit_rate)
    if description["proposal"] is not None:
        table = dataclasses.replace(
            table,
            num_rows=OpenVocabulary(
                description["proposal"]["capacity"]
            ).num_rows,
        )
    rows = id_counts.RowCounts()
    rows.add(*keys.items())
    return {
        **_describe_table(table, rows),
        # Each row has a key (8 bytes), a step (4 bytes) and a count (4 bytes).
        "num_key_bytes": 16 * table.num_rows,
        **description,
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
    """Returns (rank, lookups) points for a logarithmic axis."""
    if not len(lookups):
        return []
    ranks = np.unique(np.geomspace(1, len(lookups), 100).astype(np.int64))
    return [(int(rank), int(lookups[rank - 1])) for rank in ranks]
