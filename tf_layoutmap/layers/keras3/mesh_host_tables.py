"""Tables on the host for layers of a Keras 3 model on a mesh.

The tables of a `TPUEmbedding`, and a table with an open vocabulary, stay on the
host. The host looks up the rows before a step on the mesh and applies their
gradients after the step; see `layout.keras3.host_lookups`. Results therefore
match a model on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import function_traces, keras_private, ops, tf_private
from tf_layoutmap.layers.base import key_table
from tf_layoutmap.layers.base.key_table import KeyTable
from tf_layoutmap.layers.base.mark_weights import MarkedTables
from tf_layoutmap.layers.base.steps import EmbeddingSteps
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.layers.keras3.step_weight import StepWeight
from tf_layoutmap.layout.keras3 import context as mesh_context
from tf_layoutmap.layout.keras3 import host_lookups
from tf_layoutmap.layout.keras3.context import MeshContext
from tf_layoutmap.layout.keras3.host_lookups import HostLookup, RowsOnMesh
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh

dtensor = tf.experimental.dtensor


class MeshStepWeight(StepWeight, MeshVariable):
    """Mark weight on a mesh.

    A traced step writes the sum of marks to the variable. The number of a mark
    is the position of the lookup among the lookups of the layer in this step.
    """

    def __init__(self, steps: MeshHostTables, context: MeshContext, owner: Any):
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


class MeshHostTables:
    """Tables on the host, for a layer on a mesh."""

    weight: MeshStepWeight

    def __init__(self, tables: MarkedTables):
        """Creates the object; the weight sets itself."""
        self._tables = tables
        # Whether a step has started and not finished, for example because it
        # failed. The weight may then contain marks.
        self._is_running = False

    # Whether a training step adds keys to a vocabulary.
    adds_keys = True

    def rows_of(self, inputs: Any, weights: Any) -> list[tf.Tensor]:
        """Returns the rows of inputs on the host, without a training step."""
        raise NotImplementedError

    def open(
        self, inputs: Any, weights: Any
    ) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], tf.Tensor]]:
        """Runs a training step without a gradient tape.

        Args:
          inputs: Inputs of the layer, on the host.
          weights: None, or weights on the host.

        Returns:
          The rows, and a function that stores the gradients of the rows and
          returns their mark.
        """
        raise NotImplementedError

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        return self._tables.layer_name

    @property
    def table_names(self) -> list[str]:
        """Names of the tables. Empty if the layer itself is the table."""
        return self._tables.table_names

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the mark weight."""
        return self._tables.mark_shape

    @property
    def variable_device(self) -> str:
        """Device of the small variables of the tables."""
        return self._tables.variable_device

    @property
    def num_replicas(self) -> int:
        """Number of replicas of each step."""
        return self._tables.num_replicas

    @property
    def can_accumulate(self) -> bool:
        """False, because DTensor cannot run a step in a `tf.cond`."""
        return False

    @property
    def has_copies(self) -> bool:
        """Whether this process can copy the tables now."""
        return self._tables.has_copies

    def save(self, store: Any) -> None:
        """Writes rows, slot variables and keys."""
        self._tables.save(store)

    def load(self, store: Any) -> None:
        """Reads what `save` wrote."""
        self._tables.load(store)

    def apply(self, sum_of_marks: tf.Tensor) -> None:
        """Applies a step; in a traced step, stores the marks for the host."""
        if not tf.executing_eagerly():
            MeshVariable.assign(self.weight, sum_of_marks)
            return
        with tf_private.stop_recording(), tf.device(HOST):
            self._tables.apply(transfer.to_host_tensor(sum_of_marks))

    def look_up(
        self, inputs: Any, weights: Any, *, is_training: bool
    ) -> HostLookup:
        """Returns the rows of inputs, which are on the host or on the mesh."""
        with tf_private.stop_recording(), tf.device(HOST):
            inputs, weights = tf.nest.map_structure(
                transfer.to_host_tensor, (inputs, weights)
            )
            if not (is_training and self.weight.trainable):
                return HostLookup(self, self.rows_of(inputs, weights), None)
            rows, store_gradients = self.open(inputs, weights)
            return HostLookup(self, rows, store_gradients)

    def rows_on_mesh(self, inputs: Any, weights: Any) -> list[tf.Tensor]:
        """Returns the rows of a call of the layer, on the mesh.

        The gradient of the rows is connected with the mark weight.

        Raises:
          NotImplementedError: If a traced function on the mesh computes the
            inputs.
          TypeError: If the inputs of an eager call are not dense.
        """
        values = tf.nest.flatten((inputs, weights))
        rows = host_lookups.rows_for(self, values[0])
        if rows is None:
            if not tf.executing_eagerly():
                raise NotImplementedError(traced_inputs_error(self.layer_name))
            for value in values:
                if value is not None and (
                    not isinstance(value, tf.Tensor | np.ndarray)
                ):
                    raise TypeError(
                        "On a mesh, ids must be dense tensors of integers or "
                        f"strings. Received: {type(value).__name__} (layer "
                        f"{self.layer_name!r})."
                    )
            lookup = self.look_up(
                inputs,
                weights,
                is_training=function_traces.is_recorded(
                    self.weight.value, resumes=self.adds_keys
                ),
            )
            mesh = self.weight.mesh
            rows = RowsOnMesh(
                lookup,
                [transfer.to_replicated(value, mesh) for value in lookup.rows],
            )
        return _connect(rows, self.weight.value)

    def start_step(self) -> None:
        """Prepares for a step that may write marks to the weight."""
        if self._is_running:
            self._clear()
        self._is_running = True

    def finish_step(
        self, gradients: Sequence[tuple[HostLookup, Sequence[tf.Tensor]]]
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
                        _mark_of_position(lookup.position, _norm_of(own))
                        for lookup, own in gradients
                    ],
                    numbers=[lookup.position for lookup, _ in gradients],
                    where=f" (layer {self.layer_name!r})",
                )
                # The engine does not update the rows of lookups whose mark has
                # the factor 0, unless all factors are 0.
                self._tables.apply(
                    tf.add_n(
                        [
                            _stored(lookup, own) * factor
                            for (lookup, own), factor in zip(
                                gradients, tf.unstack(factors)
                            )
                        ]
                    )
                )
        self._is_running = False

    def _clear(self) -> None:
        weight = self.weight
        MeshVariable.assign(weight, np.zeros(weight.shape, np.float32))


class MeshKeys(MeshHostTables):
    """The table of a `ShardedEmbedding` with an open vocabulary."""

    def __init__(self, table: KeyTable):
        """Creates the object for a table."""
        super().__init__(table)
        self._table = table

    def rows_of(self, inputs: Any, weights: Any) -> list[tf.Tensor]:
        """Returns the rows of keys, and adds no key."""
        del weights  # Calls of the layer have no weights.
        keys = key_table.read_keys(inputs, self.layer_name)
        return [self._table.rows_of(keys)]

    def open(
        self, inputs: Any, weights: Any
    ) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], tf.Tensor]]:
        """Runs a training step of the vocabulary."""
        del weights
        keys: Any = key_table.read_keys(inputs, self.layer_name)
        rows, store_gradients = self._table.open(keys)
        return [rows], lambda gradients: store_gradients(*gradients)


class MeshFeatures(MeshHostTables):
    """The tables of a `TPUEmbedding`."""

    def __init__(self, steps: EmbeddingSteps):
        """Creates the object for the tables of a layer."""
        super().__init__(steps)
        self._steps = steps
        self.adds_keys = steps.spec.has_open_tables

    def rows_of(self, inputs: Any, weights: Any) -> list[tf.Tensor]:
        """Returns the activations of each feature, without a step."""
        return tf.nest.flatten(self._steps.look_up(inputs, weights))

    def open(
        self, inputs: Any, weights: Any
    ) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], tf.Tensor]]:
        """Starts a step; the rows are the activations of each feature."""
        store_gradients, activations = self._steps.open(inputs, weights)
        return activations, store_gradients


@contextlib.contextmanager
def creating_tables(context: MeshContext, layer: str) -> Iterator[None]:
    """Context manager in which a layer creates its tables on the host.

    Args:
      context: Context of the layer.
      layer: Name of the layer.

    Raises:
      NotImplementedError: If a device of the mesh belongs to another process.
    """
    mesh = context.mesh
    if mesh.num_local_devices() < mesh.size:
        raise NotImplementedError(
            "All devices of a mesh must belong to this process if the tables "
            "of a layer are on the host, as the tables of a TPUEmbedding and "
            "tables with open vocabularies. Received: a mesh with "
            f"{mesh.num_local_devices()} of {mesh.size} devices in this "
            f"process (layer {layer!r})."
        )
    with mesh_context.activated(None), tf.device(HOST):
        yield


def runs_on_mesh() -> bool:
    """Returns whether the mesh computes the call of a layer on a mesh.

    Without a mesh, for example in an exported model, TensorFlow's ops look up
    the rows.
    """
    return not keras_private.is_abstract() and (
        tf.executing_eagerly() or tracing.traced_for_mesh()
    )


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


def traced_inputs_error(layer: str) -> str:
    """Returns the error message for inputs that only the mesh has."""
    return (
        "On a mesh, the ids of a layer whose tables are on the host must be "
        "inputs of a Functional or Sequential model, or results of "
        "preprocessing layers that directly follow its inputs, and the model "
        "must use Keras' own `call` and `train_step`. The host looks up the "
        "ids before each step, because DTensor has no rules for the operations "
        f"of these tables. Received: inputs of layer {layer!r} that are "
        "computed in a traced function on the mesh. Use a Functional model, "
        "or compile the model with run_eagerly=True."
    )


def _connect(on_mesh: RowsOnMesh, marks: Any) -> list[tf.Tensor]:
    """Returns rows whose gradient is connected with the mark weight.

    Args:
      on_mesh: Rows on the mesh.
      marks: Value of the mark weight.
    """
    if on_mesh.lookup.store_gradients is None:
        return on_mesh.rows

    @tf.custom_gradient
    def connected(marks: tf.Tensor) -> Any:
        del marks

        def gradient(*upstream: Any) -> tf.Tensor:
            gradients = [
                tf.cast(tf.convert_to_tensor(value), tf.float32)
                for value in upstream
            ]
            return (
                _mark_of_host(on_mesh.lookup, gradients)
                if tf.executing_eagerly()
                else _mark_in_graph(on_mesh, gradients)
            )

        return [tf.identity(rows) for rows in on_mesh.rows], gradient

    activations: Any = connected(tf.convert_to_tensor(marks))
    return activations


def _stored(lookup: HostLookup, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Stores host gradients of a lookup, and returns their mark."""
    if lookup.store_gradients is None:
        raise RuntimeError(
            "A step on a mesh must be traced again after `trainable` of a "
            "layer whose tables are on the host was changed; call `compile`. "
            f"Received: gradients of layer {lookup.table.layer_name!r}, which "
            "was not trainable when the ids were looked up."
        )
    return lookup.store_gradients(gradients)


def _mark_of_host(
    lookup: HostLookup, gradients: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Stores eager gradients; returns their mark on the mesh."""
    layout = Layout.replicated(dtensor.fetch_layout(gradients[0]).mesh, 2)
    with tf_private.stop_recording(), tf.device(HOST):
        mark = _stored(
            lookup, [transfer.to_host_tensor(value) for value in gradients]
        )
    return transfer.to_mesh(mark, layout)


def _mark_in_graph(
    on_mesh: RowsOnMesh, gradients: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Adds gradients to the results of the step, and returns their mark."""
    collected = host_lookups.collected()
    assert collected is not None and on_mesh.index is not None
    collected.add(on_mesh, gradients)
    return _mark_of_position(on_mesh.lookup.position, _norm_of(gradients))


def _norm_of(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the norm of all gradients of a lookup."""
    squares = [tf.reduce_sum(tf.square(value)) for value in gradients]
    return tf.sqrt(tf.add_n(squares))


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
