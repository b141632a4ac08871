"""What weights with a `RowOptimizer` have in common, wherever they lie."""

from typing import Any

import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layers.shared import missing_gradients


class TrainsItself:
    """A mixin for a `keras.Variable` with an `_optimizer` and a `_write`.

    The model's optimizer hands over the gradient inside its `apply`, because
    of `overwrite_with_gradient`, and makes no slot variables. By then the tape
    has joined the gradients of all calls of the step, and the step is really
    taken: nothing trains while one only predicts, or looks at gradients.
    """

    @property
    def overwrite_with_gradient(self) -> bool:
        """True: gradients come to `assign`, inside an optimizer's `apply`."""
        return True

    def assign(self, value: Any) -> Any:
        """Takes a step inside an optimizer's `apply`; else writes `value`."""
        optimizer = _keras_private.applying_optimizer()
        if optimizer is None:
            return self._write(value)
        scale = optimizer.loss_scale_factor
        self._optimizer.update(
            value if scale is None else _divide(value, scale))
        return value

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return missing_gradients.message(self.path, ())

    def accumulate(self, gradient: Any, steps: int, is_last: Any) -> None:
        """Takes one of `steps` gradients; a step with their mean at the last.

        Args:
          gradient: Of the table.
          steps: The model's `gradient_accumulation_steps`.
          is_last: `[]` bool.
        """
        scale = _keras_private.applying_optimizer().loss_scale_factor
        self._optimizer.accumulate(
            gradient if scale is None else _divide(gradient, scale),
            steps, is_last)


def _divide(gradient: Any, divisor: float) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient / divisor
    return tf.IndexedSlices(gradient.values / divisor, gradient.indices,
                            gradient.dense_shape)


_keras_private.unscale_gradients_of(TrainsItself)
_keras_private.let_accumulate(TrainsItself)
_keras_private.require_gradients_of(TrainsItself)
