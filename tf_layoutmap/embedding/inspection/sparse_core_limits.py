"""Computes the id limits of a `SparseCoreEmbeddingConfig` from a dataset.

`tlm.inspect_ids` creates a `StackCounter` for each `SparseCores`, and
`IdReport.sparse_core_limits` returns a `SparseCoreLimits`. TensorFlow itself
stacks the tables, so that the limits have the names of its stacked tables.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_layoutmap._core import checks, tf_private
from tf_layoutmap.embedding.inspection import sparse_core_counts

if TYPE_CHECKING:
    from tf_layoutmap.embedding.configs.config import EmbeddingSpec

# Limits of TensorFlow if a program does not set them.
DEFAULT_MAX_IDS = 256
DEFAULT_MAX_IDS_PER_CHIP_PER_SAMPLE = 64

# Limits of a stack: the key in a report, and the default of TensorFlow.
_KINDS = {
    "max_ids": DEFAULT_MAX_IDS,
    "max_unique_ids": DEFAULT_MAX_IDS,
    "ids_per_chip_per_sample": DEFAULT_MAX_IDS_PER_CHIP_PER_SAMPLE,
}


@dataclasses.dataclass(frozen=True)
class SparseCores:
    """SparseCores for which `tlm.inspect_ids` counts ids.

    Attributes:
      num_cores: Number of SparseCores of all chips, a power of two. For
        example, 4 chips of type v5p have 16 SparseCores.
      cores_per_chip: Number of SparseCores of each chip: 4 for v5p, 2 for v6e.
        A replica runs on one chip.
      replicas_per_batch: Number of replicas whose samples a batch of the
        dataset contains. By default, a batch is a global batch, which contains
        the samples of all replicas. 1 if the dataset yields the batches of
        single replicas.
      table_stacking: Whether TensorFlow stacks tables. False corresponds to
        `disable_table_stacking=True` in a `SparseCoreEmbeddingConfig`.
      counts_all_features: Whether the number of tables in a stack depends on
        the samples of all features, as in `tlm.TPUEmbeddingV2`. False for
        TensorFlow's `TPUEmbeddingV2`, which counts only the first feature.
    """

    num_cores: int
    cores_per_chip: int = 4
    replicas_per_batch: int | None = None
    table_stacking: bool = True
    counts_all_features: bool = True

    def __post_init__(self):
        checks.check_int("num_cores", self.num_cores, lowest=1)
        checks.check_int(
            "cores_per_chip", self.cores_per_chip, lowest=1, highest=4
        )
        if self.num_cores & (self.num_cores - 1):
            raise ValueError(
                checks.message("num_cores", "a power of two", self.num_cores)
            )
        if self.num_cores % self.cores_per_chip:
            raise ValueError(
                f"Argument `num_cores` must be divisible by `cores_per_chip`. "
                f"Received: num_cores={self.num_cores}, "
                f"cores_per_chip={self.cores_per_chip}."
            )
        if self.replicas_per_batch is not None:
            checks.check_int(
                "replicas_per_batch",
                self.replicas_per_batch,
                lowest=1,
                highest=self.num_chips,
            )
        for name in ("table_stacking", "counts_all_features"):
            checks.check_type(name, getattr(self, name), bool, "a bool")

    @property
    def num_chips(self) -> int:
        """Number of chips, which is the number of replicas."""
        return self.num_cores // self.cores_per_chip


@dataclasses.dataclass(frozen=True)
class SparseCoreLimits:
    """Id limits for `TPUEmbeddingV2`, which a `SparseCoreEmbeddingConfig` has.

    Attributes:
      max_ids_per_table: Maximum number of ids that one SparseCore sends to one
        SparseCore, by the name of the stacked table.
      max_unique_ids_per_table: The same for different ids.
      max_ids_per_chip_per_sample: Size of the buffers of a chip, in ids per
        sample of a replica.
      overflow_share: Share of the batches that exceed one of these limits.
      default_overflow_share: Share of the batches that exceed one of the
        default limits of TensorFlow.
      curves: For each stacked table, a dict with the curves of `max_ids`,
        `max_unique_ids` and `ids_per_chip_per_sample`. A curve is a list of
        points (limit, share of the batches that exceed the limit), with
        ascending limits.
    """

    max_ids_per_table: dict[str, int]
    max_unique_ids_per_table: dict[str, int]
    max_ids_per_chip_per_sample: int
    overflow_share: float
    default_overflow_share: float
    curves: dict[str, dict[str, list[tuple[int, float]]]]


def limits_of(
    stacks: Mapping[str, Mapping[str, Any]], confidence: float
) -> SparseCoreLimits:
    """Returns the limits of all stacks of a report.

    Args:
      stacks: For each stacked table, the values of all batches, by the names in
        `_KINDS`.
      confidence: Share of the batches that do not exceed a limit, in (0, 1].
    """
    limits = {
        name: {
            kind: sparse_core_counts.limit_of(values[kind], confidence)
            for kind in _KINDS
        }
        for name, values in stacks.items()
    }
    # All stacked tables have the same buffer size per sample.
    per_sample = max(
        stack["ids_per_chip_per_sample"] for stack in limits.values()
    )
    for stack in limits.values():
        stack["ids_per_chip_per_sample"] = per_sample
    return SparseCoreLimits(
        {name: stack["max_ids"] for name, stack in limits.items()},
        {name: stack["max_unique_ids"] for name, stack in limits.items()},
        per_sample,
        _overflow_share(stacks, limits),
        _overflow_share(stacks, dict.fromkeys(stacks, _KINDS)),
        {
            name: {
                kind: sparse_core_counts.overflow_curve(values[kind])
                for kind in _KINDS
            }
            for name, values in stacks.items()
        },
    )


def _overflow_share(
    stacks: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, Mapping[str, int]],
) -> float:
    """Returns the share of the batches that exceed any limit."""
    exceeds = [
        np.array(values[kind]) > limits[name][kind]
        for name, values in stacks.items()
        for kind in _KINDS
    ]
    return float(np.any(exceeds, axis=0).mean())


class StackCounter:
    """Counts the ids of all batches for one `SparseCores`."""

    def __init__(
        self,
        cores: SparseCores,
        spec: EmbeddingSpec,
        table_configs: Sequence[Any],
        optimizer: Any,
    ):
        """Creates a counter without batches.

        Args:
          cores: The SparseCores.
          spec: Specs of the tables and features.
          table_configs: The `TableConfig` of each table.
          optimizer: Optimizer of tables whose config has no optimizer.
        """
        self._cores = cores
        self._spec = spec
        self._num_replicas = cores.replicas_per_batch or cores.num_chips
        self._tables = [copy.copy(table) for table in table_configs]
        for table, table_spec in zip(self._tables, spec.tables):
            table.name = table_spec.name
            if table.optimizer is None:
                table.optimizer = optimizer
        self._num_samples: list[int] | None = None
        # For each stack: indices of its tables and their rotations.
        self._stacks: dict[str, tuple[list[int], list[int]]] = {}
        self._counts: dict[str, list[sparse_core_counts.StepCounts]] = {}

    def add(self, batch: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> None:
        """Adds a batch.

        Args:
          batch: For each feature, the ids, the index of the sample of each id,
            and the number of samples.
        """
        num_blocks = self._num_replicas * self._cores.cores_per_chip
        num_samples = [number for _, _, number in batch]
        if self._num_samples is None:
            for feature, number in zip(self._spec.features, num_samples):
                if not number or number % num_blocks:
                    raise ValueError(
                        f"The number of samples of feature {feature.name!r} "
                        f"must be a positive multiple of {num_blocks}, the "
                        f"number of SparseCores that process a batch "
                        f"({self._num_replicas} replicas with "
                        f"{self._cores.cores_per_chip} SparseCores each). "
                        f"Received: {number} samples in the first batch. "
                        f"Change the batch size, or set `replicas_per_batch`."
                    )
            self._num_samples = num_samples
            self._stack_tables()
        for feature, number, first in zip(
            self._spec.features, num_samples, self._num_samples
        ):
            if number > first:
                raise ValueError(
                    f"Batches must not have more samples than the first batch. "
                    f"Received: {number} samples of feature {feature.name!r}, "
                    f"and {first} in the first batch."
                )
        # A smaller batch is extended with empty samples.
        for name, (tables, rotations) in self._stacks.items():
            counts = sparse_core_counts.count_step(
                [
                    sparse_core_counts.FeatureIds(
                        tables.index(feature.table), ids, samples, number
                    )
                    for feature, (ids, samples, _), number in zip(
                        self._spec.features, batch, self._num_samples
                    )
                    if feature.table in tables
                ],
                rotations,
                num_cores=self._cores.num_cores,
                cores_per_chip=self._cores.cores_per_chip,
                num_replicas=self._num_replicas,
            )
            self._counts[name].append(counts)

    def _stack_tables(self) -> None:
        """Computes the stacks of the tables with TensorFlow's function."""
        assert self._num_samples is not None
        names = [table.name for table in self._spec.tables]
        num_samples, num_features = (
            dict.fromkeys(names, 0),
            dict.fromkeys(names, 0),
        )
        for feature, number in zip(self._spec.features, self._num_samples):
            name = self._spec.table_of(feature).name
            num_samples[name] += number // self._num_replicas
            num_features[name] += 1
            if not self._cores.counts_all_features:
                break
        layouts = tf_private.sparse_core_layouts(
            self._tables,
            num_samples,
            num_features,
            self._cores.num_chips,
            self._cores.cores_per_chip,
            self._cores.table_stacking,
        )
        for index, table in enumerate(self._tables):
            layout = layouts[table.name]
            name = layout.stacked_table_name
            rotation = layout.sparse_core_shard_rotation
            indices, rotations = self._stacks.setdefault(name, ([], []))
            indices.append(index)
            rotations.append(rotation)
        self._counts = {name: [] for name in self._stacks}

    def description(self) -> dict[str, Any]:
        """Returns the settings and the counts as values for JSON."""
        return {
            "cores_per_chip": self._cores.cores_per_chip,
            "num_chips": self._cores.num_chips,
            "stacks": {
                name: {
                    "tables": [
                        self._spec.tables[index].name
                        for index in self._stacks[name][0]
                    ],
                    **{
                        kind: [getattr(count, kind) for count in counts]
                        for kind in _KINDS
                    },
                }
                for name, counts in self._counts.items()
            },
        }
