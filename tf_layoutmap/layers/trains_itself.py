"""What weights with a `RowOptimizer` have in common, wherever they lie."""

from typing import Any

import tensorflow as tf

from tf_layoutmap import _keras_private


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

    def _refuse_accumulation(self) -> None:
        """To be called by `value`, the first an optimizer's `build` asks."""
        optimizer = _keras_private.applying_optimizer()
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps:
            raise ValueError(
                "The model's optimizer must not accumulate gradients of a "
                "table with an optimizer of its own, which takes each as a "
                "step; sum the gradients of several batches in a loop of your "
                "own, or use optimizer=None. Received: "
                f"gradient_accumulation_steps={steps} (weight {self.path!r}).")


def _divide(gradient: Any, divisor: float) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient / divisor
    return tf.IndexedSlices(gradient.values / divisor, gradient.indices,
                            gradient.dense_shape)


_keras_private.unscale_gradients_of(TrainsItself)
