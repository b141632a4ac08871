"""Steps of a closed table on the host beside a TPU.

A TPU has no kernels for the ops of a table. The host therefore looks up the
rows of all replicas before the program of the TPU, and applies their gradients
after it. The program contains only the rows, as an input, and the gradients of
the rows, as an output. The weight of the table in the program is a mark, see
`layers.base.steps`. The lookups of a step and their gradients belong together,
because they are traced in the same graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding import tpu_program
from tf_layoutmap.embedding.tpu_program import ReplicatedProgram
from tf_layoutmap.layers.base import ordered_steps, steps
from tf_layoutmap.sharded import ShardedVariable

if TYPE_CHECKING:
    from tf_layoutmap.layers.base.row_optimizer import RowUpdates

# Maps each call of the layer to the ids of the calling replica, or of each
# replica in a program of all replicas, and the gradients of their rows.
_Gradients = dict[object, tuple[list[tf.Tensor], tf.Tensor]]


class ProgramSteps:
    """Lookups and steps of one table in the programs of a TPU."""

    def __init__(
        self,
        layer: str,
        make_table: Callable[[], ShardedVariable],
        optimizer: RowUpdates,
    ):
        """Creates the object in the scope of the strategy.

        Args:
          layer: Name of the layer, for messages.
          make_table: Function that returns the table.
          optimizer: Optimizer of the table.
        """
        self._layer = layer
        self._make_table = make_table
        self._optimizer = optimizer
        self._num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # The gradients of each graph, by replica.
        self._gradients: weakref.WeakKeyDictionary[
            Any, dict[int, _Gradients]
        ] = weakref.WeakKeyDictionary()

    def look_up(
        self, ids: tf.Tensor, mark: tf.Variable, *, is_trained: bool
    ) -> tf.Tensor:
        """Returns the rows of ids.

        Args:
          ids: Ids of any shape.
          mark: The mark weight, a scalar.
          is_trained: Whether the layer is trainable.
        """
        if not ordered_steps.is_in_program():
            return self._make_table().sparse_read(ids)
        program = tpu_program.replicated_program(self._num_replicas, "call")
        with tf_private.stop_recording():
            by_replica, rows = self._read(program, ids)
        if not is_trained or not steps.may_be_recorded(
            mark, None, adds_keys=False
        ):
            return rows
        gradients = self._gradients.setdefault(
            tf.compat.v1.get_default_graph(), {}
        ).setdefault(_replica(program), {})
        this_call = object()

        def record_gradients(of_rows: Sequence[tf.Tensor]) -> tf.Tensor:
            gradients[this_call] = by_replica, of_rows[0]
            return tf.ones([])

        (rows,) = steps.connect_mark(
            record_gradients,
            tf.convert_to_tensor(mark),
            [rows],
            self._num_replicas,
        )
        return rows

    def _read(
        self, program: ReplicatedProgram | None, ids: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the ids of each replica on the host, and the rows."""
        table = self._make_table()
        if program is None:
            return [ids], table.sparse_read(ids)
        by_replica = program.values_on_host(f"ids of {self._layer}", ids)
        with program.on_host(), tf.device(HOST):
            rows = [table.sparse_read(own_ids) for own_ids in by_replica]
        return by_replica, program.to_program(rows)

    def apply(self, mark: tf.Tensor) -> None:
        """Applies the gradients of all lookups of the step.

        Args:
          mark: Gradient of the mark weight: the number of lookups, multiplied
            by the factor that the program applies to the gradients.

        Raises:
          RuntimeError: If no gradients were computed.
          ValueError: If the method is called in a branch that is not executed
            in every step.
        """
        if not ordered_steps.is_in_program():
            raise ValueError(
                "The model's optimizer must be applied in every step of a "
                "TPU program, inside `strategy.run`. A loss scale, which may "
                'skip a step, is not supported; use the policy "mixed_bfloat16"'
                f" (layer {self._layer!r})."
            )
        program = tpu_program.replicated_program(self._num_replicas, "apply")
        graph = tf.compat.v1.get_default_graph()
        by_lookup = self._gradients.get(graph, {}).pop(_replica(program), None)
        if not by_lookup:
            raise RuntimeError(
                f"Layer {self._layer!r} has no gradients to apply; call it "
                "inside the tape, in the same function."
            )
        lookups = list(by_lookup.values())
        dim = self._make_table().shape[1]
        values = (mark / len(lookups)) * tf.concat(
            [tf.reshape(lookup, [-1, dim]) for _, lookup in lookups], axis=0
        )
        if program is None:
            ids = tf.concat(
                [tf.reshape(lookup, [-1]) for (lookup,), _ in lookups], 0
            )
            self._optimizer.update(tf.IndexedSlices(values, ids))
            return
        by_replica = program.to_host(values)
        with self._optimizer._settings_on_host(program), program.on_host():
            with tf.device(HOST):
                ids = tf.concat(
                    [
                        tf.reshape(of_replicas[replica], [-1])
                        for replica in range(self._num_replicas)
                        for of_replicas, _ in lookups
                    ],
                    axis=0,
                )
                values = tf.concat(by_replica, axis=0)
            self._optimizer._update_rows(ids, values)
        self._optimizer._count_step()


def _replica(program: ReplicatedProgram | None) -> int:
    """Returns the index of the replica that is being traced.

    A program of all replicas is traced once, as the first replica.
    """
    context = tf.distribute.get_replica_context()
    if program is not None or context is None:
        return 0
    index = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if index is None else int(index)
