"""Accumulated gradients of a table on a mesh.

The host concatenates the ids and gradients of several steps in variables of
variable size. DTensor requires static sizes. `MeshAccumulators` therefore holds
the newest ids and gradients in variables of a fixed capacity. Each step appends
its ids and gradients at the end, and removes as many from the front. Unused
places contain an id that no device owns.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.keras3 import embedding_rows, initial_values
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout
from tf_layoutmap.sharded.routing.checks import known_size

dtensor = tf.experimental.dtensor

# Id in variables that larger variables have replaced. A step that still uses
# these variables raises an error, because the id is outside of the table.
_RETIRED = -1


class MeshAccumulators:
    """Ids and gradients of the steps since the last update of a table.

    Attributes:
      ids: The ids, an object that checkpoints save.
      gradients: The gradients of the ids, in the same order.
    """

    def __init__(self, weight: Any):
        """Creates the object; the first step creates the variables.

        Args:
          weight: The `MeshTableWeight`.
        """
        self._weight = weight
        self._variables: tuple[Any, Any] | None = None
        # Number of places for gradients that were loaded. Their batches may
        # have been larger than all later batches.
        self._num_loaded = 0
        self.ids = AccumulatedPart(self, 0)
        self.gradients = AccumulatedPart(self, 1)
        self._assigned: list[np.ndarray[Any, Any]] = self._empty()

    def append(
        self, ids: tf.Tensor, gradients: tf.Tensor, steps: int, position: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the ids and gradients of this step and of earlier steps.

        Args:
          ids: `[num_ids]` int64, replicated.
          gradients: `[num_ids, dim]` float32, replicated.
          steps: Number of steps of each update.
          position: `[]`, number of earlier steps since the last update. If the
            value is 0, earlier gradients are discarded.

        Returns:
          Tensors of `[capacity]` and `[capacity, dim]`. The result contains ids
          that no device owns.
        """
        num_ids = known_size(ids)
        variables = self._with_capacity(self._num_loaded + steps * num_ids)
        old_ids, old_gradients = (
            variable.read_value() for variable in variables
        )
        is_first = tf.equal(position, tf.zeros([], position.dtype))
        old_ids = self._without_ids(old_ids, is_first)
        return (
            tf.concat([old_ids[num_ids:], ids], axis=0),
            tf.concat([old_gradients[num_ids:], gradients], axis=0),
        )

    def must_apply(self, ids: tf.Tensor, is_last: tf.Tensor) -> tf.Tensor:
        """Returns whether a step must apply the gradients of `ids`.

        The result is true in the last step, and if larger variables have
        replaced these variables. In the second case, the update raises an
        error.
        """
        return tf.logical_or(is_last, tf.reduce_any(ids <= _RETIRED))

    def write(
        self, ids: tf.Tensor, gradients: tf.Tensor, is_last: tf.Tensor
    ) -> None:
        """Stores the result of `append`; after the last step, stores no ids."""
        assert self._variables is not None  # `append` creates the variables.
        for variable, value in zip(
            self._variables, (self._without_ids(ids, is_last), gradients)
        ):
            variable.assign(value)

    def _without_ids(self, ids: tf.Tensor, is_removed: Any) -> tf.Tensor:
        """Replaces all ids by an unowned id if the scalar is true."""
        unowned = tf.fill(ids.shape, self._unowned)
        # The ids of replaced variables are not removed.
        return tf.where(
            tf.logical_and(is_removed, ids > _RETIRED), unowned, ids
        )

    @property
    def _unowned(self) -> tf.Tensor:
        return tf.constant(embedding_rows.unowned_id(self._weight), tf.int64)

    def _empty(self) -> list[np.ndarray[Any, Any]]:
        dim = self._weight.shape[1]
        return [np.zeros([0], np.int64), np.zeros([0, dim], np.float32)]

    def _with_capacity(self, capacity: int) -> tuple[Any, Any]:
        """Returns the variables, replaced by larger variables if necessary."""
        variables = self._variables
        if variables is None or variables[0].shape[0] < capacity:
            with tf.init_scope():
                variables = self._replace(self.values(), capacity)
        return variables

    def _replace(
        self, values: list[np.ndarray[Any, Any]], capacity: int
    ) -> tuple[Any, Any]:
        """Creates variables that hold `values`; retires the old variables."""
        weight = self._weight
        if self._variables is not None:
            self._variables[0].assign(
                self._on_mesh(
                    np.full(self._variables[0].shape, _RETIRED, np.int64)
                )
            )
            weight._mesh_context.discard_traces()
        capacity = max(capacity, len(values[0]))
        unowned = embedding_rows.unowned_id(weight)
        padded = [
            np.full([capacity], unowned, np.int64),
            np.zeros([capacity, weight.shape[1]], np.float32),
        ]
        for value, part in zip(values, padded):
            part[capacity - len(value) :] = value
        ids, gradients = (
            initial_values.make_variable(
                self._on_mesh(part), name="accumulated", trainable=False
            )
            for part in padded
        )
        self._variables = ids, gradients
        return self._variables

    def _on_mesh(self, value: np.ndarray[Any, Any]) -> tf.Tensor:
        return transfer.to_mesh(
            value, Layout.replicated(self._weight.mesh, value.ndim)
        )

    def values(self) -> list[np.ndarray[Any, Any]]:
        """Returns the accumulated ids and gradients as arrays."""
        if self._variables is None:
            return self._empty()
        with tf.init_scope():
            ids, gradients = (
                transfer.to_host(variable) for variable in self._variables
            )
        is_owned = (ids > _RETIRED) & (
            ids != embedding_rows.unowned_id(self._weight)
        )
        return [ids[is_owned], gradients[is_owned]]

    def assign(self, part: int, value: np.ndarray[Any, Any]) -> None:
        """Assigns the ids (part 0) or the gradients (part 1).

        The values are stored when both parts have the same number of rows.
        """
        self._assigned[part] = value
        ids, gradients = self._assigned
        if len(ids) != len(gradients):
            return
        capacity = 0
        if self._variables is not None:
            capacity = self._variables[0].shape[0]
        elif not len(ids):
            return
        self._num_loaded = len(ids)
        with tf.init_scope():
            self._replace([ids, gradients], capacity + len(ids))


class AccumulatedPart(tf_private.Trackable):
    """The ids or the gradients of a `MeshAccumulators`.

    In a checkpoint, the object has the same form as a `tf.Variable` of variable
    size on the host.
    """

    def __init__(self, accumulators: MeshAccumulators, part: int):
        """Creates the object; `part` is 0 for ids, and 1 for gradients."""
        self._accumulators = accumulators
        self._part = part

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the value without unused places."""
        return self._accumulators.values()[self._part]

    def assign(self, value: Any) -> None:
        """Replaces the value; see `MeshAccumulators.assign`."""
        self._accumulators.assign(self._part, np.array(value))

    def _copy_trackable_to_cpu(
        self, object_map: MutableMapping[Any, Any]
    ) -> None:
        # An asynchronous save writes the copy. The first call is eager, and the
        # second call is traced.
        with tf.device("CPU:0"):
            dtype = self.numpy().dtype
            value = tf.py_function(self.numpy, [], dtype)
            if self in object_map:
                object_map[self].assign(value)
                return
            object_map[self] = tf.Variable(
                value, trainable=False, shape=[None, *value.shape[1:]]
            )

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        with tf.init_scope(), tf.device("CPU:0"):
            return {tf_private.VARIABLE_VALUE_KEY: tf.constant(self.numpy())}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored[tf_private.VARIABLE_VALUE_KEY].numpy())
