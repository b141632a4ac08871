"""Runs TensorFlow's host ops for SparseCores on one batch of one replica.

`TPUEmbeddingV2` runs the same ops with the same attributes. The class cannot be
created without a TPU, so the tests call the ops.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

from tests.emulation import sparse_core_reference

OPS = (
    "ConvertToListOfSparseCoreCooTensors",
    "SortListOfSparseCoreCooTensors",
    "ConvertToSparseCoreCsrWrappedCooTensor",
    "GetStatsFromListOfSparseCoreCooTensors",
)


def have_kernels() -> bool:
    """Whether all host ops have kernels in this process."""
    return all(kernels.get_registered_kernels_for_op(op).kernel for op in OPS)


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a stack of tables.

    Attributes:
      value: Ragged, sparse or dense ids of one replica.
      num_samples: Number of samples.
      col_offset: First row of the table in its stack.
      rotation: Rotation of the table.
      combiner: Combiner of the table.
      weights: `[num_ids]` or a scalar.
    """

    value: Any
    num_samples: int
    col_offset: int = 0
    rotation: int = 0
    combiner: str = "sum"
    weights: Any = 1.0


class Stack:
    """The features of one stack of tables in one replica."""

    def __init__(
        self,
        features: Mapping[str, Feature],
        *,
        num_cores: int,
        cores_per_chip: int,
        name: str = "t",
    ):
        """Converts the features to lists of samples, ids and gains."""
        self._cores_per_chip = cores_per_chip
        self.num_samples = sum(one.num_samples for one in features.values())
        self._shared: dict[str, Any] = dict(
            num_replica=num_cores // cores_per_chip,
            table_vocab_size=1024,
            feature_width=8,
            num_sc_per_chip=cores_per_chip,
            table_name=name,
        )
        self.lists = [collections.defaultdict(list) for _ in range(4)]
        row_offset = 0
        for one in features.values():
            kind = _splits_and_ids(one.value)
            rows, cols, gains = tf.raw_ops.ConvertToListOfSparseCoreCooTensors(
                indices_or_row_splits=kind[0],
                values=kind[1],
                weights=one.weights,
                sample_count=one.num_samples,
                combiner=one.combiner,
                num_sc_per_chip=cores_per_chip,
                row_offset=row_offset,
                col_offset=one.col_offset,
                col_shift=one.rotation,
                num_sc_shards=num_cores,
                stacked_table_sample_count=self.num_samples,
            )
            row_offset += one.num_samples
            for core in range(cores_per_chip):
                lists = self.lists[core]
                lists["row_ids_list"].append(rows[core])
                lists["col_ids_list"].append(cols[core])
                lists["gains_list"].append(gains[core])
                lists["sample_count_list"].append(
                    one.num_samples // cores_per_chip
                )
                lists["col_offset_list"].append(one.col_offset)

    def stats(self) -> tuple[int, int]:
        """Returns the maximum numbers of ids and of different ids."""
        found = [
            tf.raw_ops.GetStatsFromListOfSparseCoreCooTensors(
                **self.lists[core], **self._shared
            )
            for core in range(self._cores_per_chip)
        ]
        ids, unique = zip(*found)
        return int(max(ids)), int(max(unique))

    def sort(self, max_ids: int, max_unique_ids: int) -> list[Any]:
        """Returns the sorted ids of each SparseCore."""
        return [
            tf.raw_ops.SortListOfSparseCoreCooTensors(
                **self.lists[core],
                **self._shared,
                max_ids_per_sparse_core=max_ids,
                max_unique_ids_per_sparse_core=max_unique_ids,
            )
            for core in range(self._cores_per_chip)
        ]

    def buffers(
        self, sorted_ids: list[Any], per_sample: int, drop: bool = False
    ) -> Any:
        """Returns the buffers of the chip."""
        rows, cols, gains, counts = zip(*sorted_ids)
        shared = dict(self._shared)
        del shared["num_sc_per_chip"]
        return tf.raw_ops.ConvertToSparseCoreCsrWrappedCooTensor(
            sorted_row_ids_list=rows,
            sorted_col_ids_list=cols,
            sorted_gains_list=gains,
            id_counts_list=counts,
            splits=tf.constant(0, tf.int64),
            sample_count_per_sc=self.num_samples // self._cores_per_chip,
            max_minibatches_per_sc=1,
            max_ids_per_chip_per_sample=per_sample,
            allow_id_dropping=drop,
            **shared,
        )


def stack_of(
    features: Sequence[sparse_core_reference.Feature],
    *,
    num_cores: int,
    cores_per_chip: int,
    kind: str = "ragged",
) -> Stack:
    """Returns the stack of the features of the reference.

    Args:
      features: The features of one replica.
      num_cores: Number of SparseCores.
      cores_per_chip: Number of SparseCores of a chip.
      kind: "ragged", "sparse", or "dense". Features whose samples do not have
        one id each are then ragged.
    """
    return Stack(
        {
            str(index): Feature(
                _tensor_of(one.samples, kind),
                len(one.samples),
                one.col_offset,
                one.rotation,
                one.combiner,
                one.weights,
            )
            for index, one in enumerate(features)
        },
        num_cores=num_cores,
        cores_per_chip=cores_per_chip,
    )


def _tensor_of(samples: Sequence[Sequence[int]], kind: str) -> Any:
    if kind == "dense" and all(len(sample) == 1 for sample in samples):
        return tf.constant(samples)
    ragged = tf.ragged.constant(samples, dtype=tf.int64, ragged_rank=1)
    return ragged.to_sparse() if kind == "sparse" else ragged


def _splits_and_ids(value: Any) -> tuple[tf.Tensor, tf.Tensor]:
    if isinstance(value, tf.RaggedTensor):
        splits, ids = value.row_splits, value.values
    elif isinstance(value, tf.SparseTensor):
        splits, ids = value.indices, value.values
    else:
        splits, ids = tf.zeros([0], tf.int32), tf.reshape(value, [-1])
    return tf.cast(splits, tf.int32), tf.cast(ids, tf.int32)
