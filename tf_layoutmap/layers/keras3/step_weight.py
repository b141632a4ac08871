"""Mark weights of Keras 3 layers.

A layer has a mark weight if an engine trains its tables; see
`layers.base.mark_weights`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private, strategies
from tf_layoutmap.layers.base import mark_weights, weight_files
from tf_layoutmap.layers.base.mark_weights import MarkedTables
from tf_layoutmap.layers.keras3.row_optimizer import (
    TakesGradients,
    check_not_stateless,
    unscaled,
)
from tf_layoutmap.layers.keras3.step_accumulation import MAX_STEPS, GradientSum


class StepWeight(TakesGradients, keras.Variable):
    """Mark weight: notifies a layer when the model's optimizer is applied.

    `overwrite_with_gradient` is true. The model's optimizer therefore passes
    the gradient of the weight to `assign` when it applies a step, and `assign`
    applies the step to the tables.
    """

    def __init__(self, steps: MarkedTables, *, name: str = "marks"):
        """Creates the weight, which passes the sums of marks to `steps`."""
        self._steps = steps
        # Maps each replica to the sum of its accumulated gradients.
        self._sums: dict[int, GradientSum] = {}
        # An initializer is passed instead of a value, because Keras creates the
        # value later if a function is being traced.
        super().__init__(
            keras.initializers.Zeros(),
            shape=steps.mark_shape,
            name=name,
            dtype="float32",
            autocast=False,
        )

    @property
    def overwrite_with_gradient(self) -> bool:
        """True, so that an optimizer's `apply` passes gradients to `assign`."""
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        raise AttributeError(
            "`overwrite_with_gradient` of a mark weight is read-only."
        )

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return mark_weights.missing_gradient_message(
            self._steps.layer_name, self._steps.table_names
        )

    def numpy(self) -> np.ndarray:
        """Returns zeros that hold a copy of the tables, for `get_weights`."""
        return mark_weights.marks_with_tables(self._steps)

    def assign(self, value: Any) -> Any:
        """Applies a step to the tables, with a sum of marks as `value`.

        If the caller is not an optimizer, but for example `set_weights`, the
        tables are restored from the copy that `value` holds.

        Raises:
          RuntimeError: If the caller is not an optimizer, and `value` holds no
            copy of the tables. Keras' weights do not contain the tables.
        """
        optimizer = keras_private.applying_optimizer()
        if optimizer is None:
            copied = mark_weights.tables_in(value)
            if copied is None:
                raise RuntimeError(
                    weight_files.set_weights_error(self._steps.layer_name)
                )
            self._steps.load(copied)
            self.discard_accumulated()
            return value
        check_not_stateless(self.path)
        scale = optimizer.loss_scale_factor
        self._steps.apply(unscaled(value, scale))
        return value

    def accumulate(
        self, gradient: Any, steps: int, is_last: Any, position: Any
    ) -> None:
        """Accumulates a gradient; applies the mean after the last gradient.

        Args:
          gradient: Gradient of the weight.
          steps: The model's `gradient_accumulation_steps`.
          is_last: `[]` bool tensor: whether this is the last of `steps`
            gradients.
          position: `[]` integer tensor, number of earlier gradients of these
            `steps`; None on parameter servers.

        Raises:
          ValueError: If the tables do not support accumulated gradients.
        """
        where = (
            f"Received: gradient_accumulation_steps={steps} (layer "
            f"{self._steps.layer_name!r})."
        )
        if (
            position is None
            or strategies.on_servers()
            or not self._steps.can_accumulate
        ):
            raise ValueError(
                "The model's optimizer must not accumulate gradients of a "
                "table on the host or a TPU if a step of the table cannot run "
                "in the `tf.cond` in which Keras applies accumulated "
                "gradients. On the host, a TPUEmbedding supports one replica, "
                "a MirroredStrategy, and processes with one replica each. A "
                "ShardedEmbedding with an open vocabulary supports one "
                f"replica. Use larger batches. {where}"
            )
        if steps > MAX_STEPS:
            raise ValueError(
                "Argument `gradient_accumulation_steps` must be at most "
                f"{MAX_STEPS}, because the engine keeps the gradients of "
                f"{MAX_STEPS} calls. {where}"
            )
        optimizer = keras_private.applying_optimizer()
        assert optimizer is not None  # An optimizer calls this method.
        check_not_stateless(self.path)
        self._sum_of_replica().add(
            unscaled(gradient, optimizer.loss_scale_factor),
            steps,
            is_last,
            position,
        )

    def discard_accumulated(self) -> None:
        """Discards accumulated gradients after the tables were restored."""
        for sum_of_replica in self._sums.values():
            sum_of_replica.discard()

    def _sum_of_replica(self) -> GradientSum:
        """Returns the sum of the calling replica.

        All replicas get the same sums of marks, and each replica applies them.
        """
        replica = 0
        if self._steps.num_replicas > 1:
            context = tf.distribute.get_replica_context()
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        if replica not in self._sums:
            self._sums[replica] = GradientSum(
                self._steps.apply, self._steps.layer_name
            )
        return self._sums[replica]

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        # The saved value of this weight is always zero. The value is not
        # restored, because under a strategy Keras would call `assign`.
        del restored_tensors
        self.discard_accumulated()
        return self.value
