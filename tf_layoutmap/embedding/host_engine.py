"""The engine's ops as methods (docs/ops.md, "The host engine")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.embedding import config, ragged_ids, tables


class HostEngine:
    """The steps in flight of one embedding.

    Rows and slot variables stay in their variables; they are handed to each
    call. The engine lives as long as its handle, and is not saved.
    """

    def __init__(
        self, spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]], *, num_replicas: int,
    ):
        """Creates the engine, eagerly, on the host.

        Args:
          spec: Tables and features.
          variables: What `tables.create_tables` made of the spec.
          num_replicas: Replicas that take part in each step.
        """
        self._spec = spec
        self._num_replicas = num_replicas
        # Only variables are kept: their handles are taken at each call, so
        # that a function being traced captures them.
        self._shards = []
        self._slots = []
        counts, offsets = [], []
        for table in spec.tables:
            shards = tables.shards_of(
                variables[table.name][tables.PARAMETERS])
            counts.append(len(shards))
            offsets.extend(_offsets(shards))
            self._shards.extend(shards)
            for slot in table.optimizer.slots if table.optimizer else ():
                self._slots.extend(
                    tables.shards_of(variables[table.name][slot.name]))
        with tf.device(tables.HOST):
            self._handle = _ops.create_host_engine(
                num_replicas=num_replicas,
                table_names=[one.name for one in spec.tables],
                table_num_rows=[one.num_rows for one in spec.tables],
                table_dims=[one.dim for one in spec.tables],
                table_num_shards=counts,
                table_placements=["div"] * len(spec.tables),
                table_offsets=offsets,
                table_optimizers=[
                    one.optimizer.name if one.optimizer else "none"
                    for one in spec.tables],
                feature_names=[one.name for one in spec.features],
                feature_tables=[one.table for one in spec.features],
                feature_combiners=[
                    spec.table_of(one).combiner for one in spec.features],
                feature_max_sequence_lengths=[
                    one.max_sequence_length for one in spec.features])

    def enqueue(
        self, replica: int, training: Any,
        features: Sequence[ragged_ids.FeatureIds],
    ):
        """Hands the ids of one step over; `features` in the spec's order."""
        ragged_ids.unify_id_types(features)
        with tf.device(self._handle.device):
            return _ops.enqueue_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                training=tf.convert_to_tensor(training, tf.bool),
                ids=[one.ids for one in features],
                splits=[tf.cast(one.splits, tf.int64) for one in features],
                num_samples=tf.stack(
                    [tf.cast(one.num_samples, tf.int64) for one in features]),
                weights=[one.weights for one in features])

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        with tf.device(self._handle.device):
            return _ops.dequeue_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                shards=_handles(self._shards),
                num_features=len(self._spec.features),
                dims=[self._spec.table_of(one).dim
                      for one in self._spec.features],
                max_sequence_lengths=[one.max_sequence_length
                                      for one in self._spec.features])

    def apply(
        self, replica: int, gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients of the step dequeued last.

        Args:
          replica: Whose gradients they are.
          gradients: Shaped as the activations, one per feature.
          hyperparameters: One float32 vector per table, learning rate first.
        """
        with tf.device(self._handle.device):
            return _ops.apply_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                gradients=list(gradients),
                hyperparameters=list(hyperparameters),
                shards=_handles(self._shards),
                slots=_handles(self._slots))

    def reset(self):
        """Forgets every step in flight."""
        with tf.device(self._handle.device):
            return _ops.reset_host_engine(engine=self._handle)

    def describe(self) -> dict[str, Any]:
        """Returns what the engine holds, as Python values."""
        with tf.init_scope(), tf.device(self._handle.device):
            found = _ops.describe_host_engine(engine=self._handle)
        return {
            "pending": found.pending.numpy().tolist(),
            "awaiting": found.awaiting.numpy().tolist(),
            "num_updates": int(found.num_updates),
            "poisoned": found.poisoned.numpy().decode(),
        }


def _offsets(shards: Sequence[tf.Variable]) -> list[int]:
    offsets = [0]
    for shard in shards:
        offsets.append(offsets[-1] + int(shard.shape[0]))
    return offsets


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]
