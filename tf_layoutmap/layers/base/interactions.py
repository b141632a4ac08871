"""The dot products of all pairs of features.

`dot_interaction` is `tlm.ops.dot_interaction`, and `DotInteractionCore` is the
part of the layer `DotInteraction` that both Keras versions share.

Unlike the C++ op in `_core.ops`, the function checks its arguments and also
works where the C++ op has no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import keras
import tensorflow as tf

from tf_layoutmap._core import op_gradients, tf_private
from tf_layoutmap._core import ops as _ops
from tf_layoutmap.layers.base.keras_version_guard import LayerBase
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.sharded.routing import checks as routing_checks

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike


def dot_interaction(
    features: Sequence[TensorLike],
    *,
    self_interaction: bool = False,
    skip_gather: bool = False,
) -> tf.Tensor:
    """Returns the dot products of all pairs of features of each sample.

    This is the interaction of features in DLRM (arXiv:1906.00091). The products
    are in the order of `keras_rs.layers.DotInteraction`: the lower triangle of
    the matrix of products, row by row.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> user, item, hour = [[1., 2.]], [[3., 4.]], [[5., 6.]]
    >>> tlm.ops.dot_interaction([user, item, hour]).numpy().tolist()
    [[11.0, 17.0, 39.0]]

    For float32 tensors, one C++ op computes the result, and another one the
    gradients. Stock operations compute the same result, up to rounding, for
    other dtypes, on a GPU, in functions that XLA compiles (`jit_compile=True`,
    TPUs), on a mesh, for symbolic Keras tensors, and while a SavedModel is
    saved. A function that was traced before a SavedModel is saved can contain
    the C++ op; `tlm.layers.DotInteraction` uses stock operations outside of
    training.
    If a `tf.function` is not traced for a mesh and gets tensors on a mesh, each
    device computes the full result.

    Results do not depend on the number of threads or the instruction set.

    Args:
      features: One tensor per feature. All tensors have the same shape
        `[num_samples, dim]` and the same floating-point dtype.
      self_interaction: Whether to include the product of each feature with
        itself.
      skip_gather: Whether to return the full matrix of products, with zeros
        above the lower triangle.

    Returns:
      Tensor of shape `[num_samples, num_products]`. For n features,
      `num_products` is `n * (n - 1) / 2`; with `self_interaction`,
      `n * (n + 1) / 2`; with `skip_gather`, `n * n`.

    Raises:
      TypeError: If `features` is not a list or tuple, or the dtypes differ or
        are not floating-point dtypes.
      ValueError: If `features` is empty, a tensor does not have rank 2, or the
        shapes differ.
    """
    if not isinstance(features, (list, tuple)):
        raise TypeError(
            "Argument `features` must be a list or tuple of tensors, one per "
            f"feature. Received: {type(features).__name__}."
        )
    options = {"self_interaction": self_interaction, "skip_gather": skip_gather}
    is_symbolic = any(
        isinstance(feature, keras.KerasTensor) for feature in features
    )
    tensors = (
        cast("Sequence[Any]", features)
        if is_symbolic
        else [_as_tensor(x) for x in features]
    )
    check_shapes([tensor.shape for tensor in tensors], "features")
    _check_dtypes([tensor.dtype for tensor in tensors])
    if is_symbolic:
        return op_gradients.dot_interaction(tensors, api=keras.ops, **options)
    if _uses_stock_ops(tensors):
        return op_gradients.dot_interaction(tensors, **options)
    return _ops.dot_interaction(features=tensors, **options)


def check_shapes(
    shapes: Sequence[Any], argument: str, where: str | None = None
) -> None:
    """Checks the shapes of features, whose dimensions may be unknown.

    Args:
      shapes: Shape of each feature: `tf.TensorShape`, tuple or list.
      argument: Name of the argument with the features.
      where: Layer to which the features belong, for the error message.

    Raises:
      ValueError: If `shapes` is empty, a feature does not have rank 2, or the
        shapes differ.
    """
    location = "" if where is None else f" ({where})"
    shapes = [tf.TensorShape(shape) for shape in shapes]
    if not shapes:
        raise ValueError(
            f"Argument `{argument}` must contain at least one tensor. "
            f"Received: an empty list{location}."
        )
    for i, shape in enumerate(shapes):
        if shape.rank not in (None, 2):
            raise ValueError(
                f"All tensors of `{argument}` must have rank 2, [num_samples, "
                f"dim]. Received: shape {shape} at index {i}{location}."
            )
    merged = shapes[0]
    for i, shape in enumerate(shapes):
        if not merged.is_compatible_with(shape):
            raise ValueError(
                f"All tensors of `{argument}` must have the same shape. "
                f"Received: shape {shape} at index {i}, shape {merged} before "
                f"it{location}. To interact features of different dimensions, "
                "project them to one dimension first, for example by a Dense "
                "layer."
            )
        merged = merged.merge_with(shape)


def _as_tensor(feature: Any) -> Any:
    if tf.is_tensor(feature) or hasattr(feature, "_keras_history"):
        return feature
    if isinstance(feature, keras.Variable):
        feature = feature.value
    return tf.convert_to_tensor(feature)


def _check_dtypes(dtypes: Sequence[Any]) -> None:
    names = [tf.as_dtype(dtype).name for dtype in dtypes]
    if len(set(names)) > 1 or not tf.as_dtype(dtypes[0]).is_floating:
        raise TypeError(
            "All tensors of `features` must have the same floating-point "
            f"dtype. Received: {', '.join(names)}."
        )


def _uses_stock_ops(tensors: Sequence[Any]) -> bool:
    """Returns whether the C++ op cannot compute the products."""
    return (
        tensors[0].dtype != tf.float32
        # Symbolic tensors of tf_keras are not tensors of TensorFlow.
        or not all(map(tf.is_tensor, tensors))
        or routing_checks.in_xla()
        or tf_private.in_save_context()
        or _runs_on_gpu()
        or tracing.DEVICE in tf_private.current_device()
        or tracing.mesh_of_operation() is not None
        or any(map(tracing.on_mesh, tensors))
    )


def _runs_on_gpu() -> bool:
    """Returns whether TensorFlow places operations on a GPU by default.

    The C++ op runs on the host, and TensorFlow would copy all features and
    their gradients to the host and back.
    """
    device = tf.DeviceSpec.from_string(tf_private.current_device() or "")
    if device.device_type is not None:
        return device.device_type == "GPU"
    return bool(tf.config.list_logical_devices("GPU"))


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
        return dot_interaction(inputs, **options)

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
        check_shapes(shapes, "inputs", f"layer {self.name!r}")

    def _check_keras_version(self, inputs: Any) -> None:
        raise NotImplementedError

    def _shape(self, shape: tuple[int | None, int]) -> Any:
        """Returns a shape in the type that the Keras version uses."""
        raise NotImplementedError


# Python's error for a missing argument contains this name.
DotInteractionCore.__init__.__qualname__ = "DotInteraction.__init__"
