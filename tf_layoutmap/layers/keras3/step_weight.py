"""The weight of a layer whose tables an engine trains: it takes the marks."""

from typing import Any

import keras

from tf_layoutmap import _keras_private
from tf_layoutmap.layers.keras3.self_training import TakesGradients
from tf_layoutmap.layers.steps import missing_gradients
from tf_layoutmap.layers.steps.step_taker import StepTaker


class StepWeight(TakesGradients, keras.Variable):
    """Tells a layer when the model's optimizer takes a step.

    By `overwrite_with_gradient` the optimizer hands its gradient to `assign`,
    inside its `apply`: then the step is really taken.
    """

    def __init__(self, steps: StepTaker):
        """Takes what is told of a step."""
        self._steps = steps
        # Of a callable: Keras may be tracing, and make the value later.
        super().__init__(
            keras.initializers.Zeros(),
            shape=steps.mark_shape,
            name="marks",
            dtype="float32",
            autocast=False,
        )

    @property
    def overwrite_with_gradient(self) -> bool:
        """True: gradients come to `assign`."""
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        raise AttributeError("A step weight has no gradient of its own.")

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return missing_gradients.message(
            self._steps.layer_name, self._steps.table_names
        )

    def assign(self, value: Any) -> Any:
        """Takes a step inside an optimizer's `apply`; else refuses.

        Raises:
          RuntimeError: `set_weights`, which has no tables, is called.
          ValueError: The optimizer accumulates gradients.
        """
        optimizer = _keras_private.applying_optimizer()
        if optimizer is None:
            raise RuntimeError(
                missing_gradients.tables_are_no_weights(self._steps.layer_name)
            )
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps:
            raise ValueError(
                "The model's optimizer must not accumulate gradients: the "
                "tables have optimizers of their own, which take each as a "
                f"step. Received: gradient_accumulation_steps={steps} (layer "
                f"{self._steps.layer_name!r})."
            )
        scale = optimizer.loss_scale_factor
        self._steps.apply(value if scale is None else value / scale)
        return value

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        # A checkpoint has the zeros that it holds; under a strategy Keras would
        # `assign` them.
        del restored_tensors
        return self.value
