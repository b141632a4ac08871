"""Tables with open vocabularies in a Keras 3 model on a mesh.

The table and its vocabulary stay on the host. The host looks up the rows before
a step on the mesh and applies their gradients after the step; see
`layout.keras3.host_lookups`. Results therefore match a model on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.layers.base import key_table
from tf_layoutmap.layers.base.key_table import KeyTable
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.layers.keras3.tpu_embedding import StepWeight
from tf_layoutmap.layout.keras3 import host_lookups
from tf_layoutmap.layout.keras3.context import MeshContext
from tf_layoutmap.layout.keras3.host_lookups import HostLookup, RowsOnMesh
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh

dtensor = tf.experimental.dtensor


class MeshStepWeight(StepWeight, MeshVariable):
    """Mark weight on a mesh.

    A traced step writes the sum of marks to the variable. The number of a mark
    is the position of the lookup among the lookups of the layer in this step.
    """

    _is_on_host = False

    def __init__(self, steps: MeshKeys, context: MeshContext, owner: Any):
        """Creates the weight of a layer.

        Args:
          steps: Object to which the weight passes sums of marks.
          context: Context with the mesh.
          owner: Weak reference to the layer.
        """
        self._mesh_context = context
        self._mesh_owner = owner
        self._mesh_is_state = False
        self._given_layout = Layout.replicated(
            context.mesh, len(steps.mark_shape)
        )
        super().__init__(steps)
        steps.weight = self


class MeshKeys:
    """Table of keys on the host, for a layer on a mesh."""

    weight: MeshStepWeight

    def __init__(self, table: KeyTable):
        """Creates the object; the weight sets itself."""
        self._table = table
        # Whether a step has started and not finished, for example because it
        # failed. The weight may then contain marks.
        self._is_running = False

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        return self._table.layer_name

    @property
    def table_names(self) -> list[str]:
        """Empty, because the layer itself is the table."""
        return self._table.table_names

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the mark weight."""
        return self._table.mark_shape

    @property
    def variable_device(self) -> str:
        """Device of the small variables of the table."""
        return self._table.variable_device

    @property
    def num_replicas(self) -> int:
        """Number of replicas of each step."""
        return self._table.num_replicas

    @property
    def has_copies(self) -> bool:
        """Whether this process can copy the table now."""
        return self._table.has_copies

    def save(self, store: Any) -> None:
        """Writes rows, slot variables and keys."""
        self._table.save(store)

    def load(self, store: Any) -> None:
        """Reads what `save` wrote."""
        self._table.load(store)

    def apply(self, sum_of_marks: tf.Tensor) -> None:
        """Applies a step; in a traced step, stores the marks for the host."""
        if not tf.executing_eagerly():
            MeshVariable.assign(self.weight, sum_of_marks)
            return
        with tf_private.stop_recording(), tf.device(HOST):
            self._table.apply(transfer.to_host_tensor(sum_of_marks))

    def look_up(self, keys: Any, *, is_training: bool) -> HostLookup:
        """Returns the rows of keys, which are on the host or on the mesh."""
        table = self._table
        with tf_private.stop_recording(), tf.device(HOST):
            keys = key_table.read_keys(
                transfer.to_host_tensor(keys), table.layer_name
            )
            if not (is_training and self.weight.trainable):
                return HostLookup(self, table.rows_of(keys), None)
            rows, store_gradients = table.open(keys)
            return HostLookup(self, rows, store_gradients)

    def start_step(self) -> None:
        """Prepares for a step that may write marks to the weight."""
        if self._is_running:
            self._clear()
        self._is_running = True

    def finish_step(
        self, gradients: Sequence[tuple[HostLookup, tf.Tensor]]
    ) -> None:
        """Applies the gradients of lookups whose marks are in the weight.

        Args:
          gradients: Lookups of the step, and the gradients of their rows.
        """
        marks = transfer.to_host(self.weight.divided_value)
        # Marks contain negative zeros, also if they were multiplied by 0.
        if gradients and np.signbit(marks).any():
            self._clear()
            with tf.device(HOST):
                factors = ops.read_marks(
                    marks=marks,
                    issued=[
                        _mark_of_position(lookup.position, tf.norm(gradient))
                        for lookup, gradient in gradients
                    ],
                    numbers=[lookup.position for lookup, _ in gradients],
                    where=f" (layer {self.layer_name!r})",
                )
                # The engine does not update the rows of lookups whose mark has
                # the factor 0, unless all factors are 0.
                self._table.apply(
                    tf.add_n(
                        [
                            _stored(lookup, gradient) * factor
                            for (lookup, gradient), factor in zip(
                                gradients, tf.unstack(factors)
                            )
                        ]
                    )
                )
        self._is_running = False

    def _clear(self) -> None:
        weight = self.weight
        MeshVariable.assign(weight, np.zeros(weight.shape, np.float32))


def mask_of(keys: tf.Tensor, mesh: Mesh) -> tf.Tensor:
    """Returns whether each key is not padding, on the mesh.

    Args:
      keys: Keys on the host or on the mesh, or the mask that replaces strings
        on the mesh.
      mesh: The mesh.
    """
    if keys.dtype == tf.bool:
        return keys
    if tf.executing_eagerly():
        with tf_private.stop_recording(), tf.device(HOST):
            keys = transfer.to_host_tensor(keys)
            return transfer.to_replicated(key_table.is_not_padding(keys), mesh)
    return key_table.is_not_padding(keys)


def traced_keys_error(layer: str) -> str:
    """Returns the error message for keys that only the mesh has."""
    return (
        "On a mesh, the keys of a layer with an open vocabulary must be inputs "
        "of a Functional or Sequential model, or results of preprocessing "
        "layers that directly follow its inputs, and the model must use "
        "Keras' own `call` and `train_step`. The host looks up the keys before "
        "each step, because DTensor has no rules for the operations that "
        f"assign rows to keys. Received: keys of layer {layer!r} that are "
        "computed in a traced function on the mesh. Use a Functional model, "
        "or compile the model with run_eagerly=True."
    )


def connect(rows: RowsOnMesh, marks: Any, dtype: Any) -> tf.Tensor:
    """Returns rows whose gradient is connected with the mark weight.

    Args:
      rows: Rows on the mesh.
      marks: Value of the mark weight.
      dtype: Dtype of the result.
    """
    if rows.lookup.store_gradients is None:
        return tf.cast(rows.rows, dtype)

    @tf.custom_gradient
    def connected(marks: tf.Tensor) -> Any:
        del marks

        def gradient(upstream: Any) -> tf.Tensor:
            upstream = tf.cast(tf.convert_to_tensor(upstream), tf.float32)
            return (
                _mark_of_host(rows.lookup, upstream)
                if tf.executing_eagerly()
                else _mark_in_graph(rows, upstream)
            )

        return tf.identity(rows.rows), gradient

    return tf.cast(connected(tf.convert_to_tensor(marks)), dtype)


def _stored(lookup: HostLookup, gradient: tf.Tensor) -> tf.Tensor:
    """Stores host gradients of a lookup, and returns their mark."""
    if lookup.store_gradients is None:
        raise RuntimeError(
            "A step on a mesh must be traced again after `trainable` of a "
            "layer with an open vocabulary was changed; call `compile`. "
            f"Received: gradients of layer {lookup.table.layer_name!r}, which "
            "was not trainable when the keys were looked up."
        )
    return lookup.store_gradients(gradient)


def _mark_of_host(lookup: HostLookup, gradient: tf.Tensor) -> tf.Tensor:
    """Stores an eager gradient; returns its mark on the mesh."""
    layout = Layout.replicated(dtensor.fetch_layout(gradient).mesh, 2)
    with tf_private.stop_recording(), tf.device(HOST):
        mark = _stored(lookup, transfer.to_host_tensor(gradient))
    return transfer.to_mesh(mark, layout)


def _mark_in_graph(rows: RowsOnMesh, gradient: tf.Tensor) -> tf.Tensor:
    """Adds a gradient to the results of the step, and returns its mark."""
    collected = host_lookups.collected()
    assert collected is not None and rows.index is not None
    collected.add(rows, gradient)
    return _mark_of_position(rows.lookup.position, tf.norm(gradient))


def _mark_of_position(position: int, norm: tf.Tensor) -> tf.Tensor:
    """Returns the mark of a lookup in a traced step, as the engine's marks.

    In contrast to the engine, the identity does not depend on the norm, because
    the host computes the norm again, with other rounding errors.

    Args:
      position: Position of the lookup among the lookups of the layer.
      norm: Norm of the gradient; not finite if a value is not finite.
    """
    with tf.init_scope(), tf.device(HOST):
        mark = ops.issue_mark(
            coordinates=tf.ones([1]), numbers=[position]
        ).numpy()
    is_coordinate = np.zeros(mark.shape, np.bool_)
    is_coordinate[:, 0] = mark[:, 0] != 0
    return tf.where(
        tf.constant(is_coordinate),
        tf.reshape(norm, [1, 1]),
        tf.constant(mark * np.float32(2.0**-30)),
    )
