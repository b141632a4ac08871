"""`DotInteraction`: the part that both Keras versions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import op_gradients
from tf_layoutmap.layers.base import interactions
from tf_layoutmap.layers.base.keras_version_guard import LayerBase

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike


class DotInteractionCore(LayerBase):
    """Arguments, checks and call of the layer."""

    def __init__(
        self,
        self_interaction: bool = False,
        skip_gather: bool = False,
        **kwargs: object,
    ):
        """Creates the layer.

        Args:
          self_interaction: Whether to include the product of each feature with
            itself.
          skip_gather: Whether to return the full matrix of products, with zeros
            above the lower triangle.
          **kwargs: Arguments of every Keras layer, such as `name`.
        """
        super().__init__(**kwargs)
        # XLA has no kernel for the C++ op. Keras 3 reads this attribute;
        # tf_keras compiles with XLA only if `jit_compile=True` is passed.
        self.supports_jit = False
        self.self_interaction = self_interaction
        self.skip_gather = skip_gather

    def __call__(
        self, inputs: object, *args: object, **kwargs: object
    ) -> object:
        """Calls the layer. Models of the other Keras version raise an error."""
        self._check_keras_version(inputs)
        if not isinstance(inputs, (list, tuple)):
            raise TypeError(
                "Argument `inputs` must be a list or tuple of tensors, one per "
                f"feature. Received: {type(inputs).__name__} (layer "
                f"{self.name!r})."
            )
        self._check_shapes(
            [getattr(tensor, "shape", None) for tensor in inputs]
        )
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self, inputs: Sequence[TensorLike], training: bool | None = None
    ) -> tf.Tensor:
        """Returns the dot products of all pairs of features.

        Args:
          inputs: One tensor per feature, all with the shape `[num_samples,
            dim]`.
          training: Whether the layer is called in training. If false, stock
            operations compute the result.

        Returns:
          Tensor of shape `[num_samples, num_products]`, as for
          `tlm.ops.dot_interaction`.
        """
        options = {
            "self_interaction": self.self_interaction,
            "skip_gather": self.skip_gather,
        }
        # In tf_keras, the argument can be a tensor.
        if training is None or tf.is_tensor(training) or not training:
            # An exported model must not contain the C++ op, because a server
            # loads it without this package.
            return op_gradients.dot_interaction(inputs, **options)
        return interactions.dot_interaction(inputs, **options)

    def compute_output_shape(
        self, input_shape: Sequence[Sequence[int | None]]
    ) -> tuple[int | None, ...] | tf.TensorShape:
        """Returns the shape of the result for the shapes of the features."""
        self._check_shapes(input_shape)
        size = len(input_shape)
        if self.skip_gather:
            num_products = size * size
        else:
            num_products = size * (size - 1 + 2 * self.self_interaction) // 2
        return self._shape((input_shape[0][0], num_products))

    def get_config(self) -> dict[str, object]:
        """Returns the arguments from which Keras recreates the layer."""
        return {
            **super().get_config(),
            "self_interaction": self.self_interaction,
            "skip_gather": self.skip_gather,
        }

    def _check_shapes(self, shapes: Sequence[Any]) -> None:
        interactions.check_shapes(shapes, "inputs", f"layer {self.name!r}")

    def _check_keras_version(self, inputs: Any) -> None:
        raise NotImplementedError

    def _shape(self, shape: tuple[int | None, int]) -> Any:
        """Returns a shape in the type that the Keras version uses."""
        raise NotImplementedError


# Python's error for a missing argument contains this name.
DotInteractionCore.__init__.__qualname__ = "DotInteraction.__init__"
