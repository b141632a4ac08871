"""How many samples the inputs of a step have, as far as it is known."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import config, ragged_ids


class StepShapes:
    """Sizes that `build` was told, and those of the steps dequeued."""

    def __init__(self, spec: config.EmbeddingSpec):
        self._spec = spec
        # One per feature, once `declare` said so; None in it: any size.
        self._num_samples: list[int | None] | None = None
        # Sizes of samples behind the first dimension, which later steps must
        # have too; unknown until the feature, `build` or an input tells.
        self._inner: list[tuple[int, ...] | None] = [
            None if one.output_shape is None else one.output_shape[1:]
            for one in spec.features]
        # Per replica: the graph of its last dequeue, and samples by feature.
        self._dequeued: dict[int, tuple[Any, list[Any]]] = {}

    def declare(self, shapes: list[tuple[int | None, ...]]):
        """Holds every later step to these shapes of samples.

        Raises:
          ValueError: If others were declared before, or contradict the
            `output_shape` of a feature.
        """
        num_samples: list[int | None] = []
        for index, shape in enumerate(shapes):
            feature = self._spec.features[index]
            if feature.output_shape is None:
                self._settle_inner(index, shape[1:])
            else:
                # The shape of the feature comes first, as in TensorFlow.
                shape = feature.output_shape
            num_samples.append(_count(shape))
        if self._num_samples not in (None, num_samples):
            raise ValueError(
                "`build` was called with per-replica batch sizes "
                f"{self._num_samples}. Received: {num_samples}.")
        self._num_samples = num_samples

    def check_input(
        self, index: int, inputs: ragged_ids.FeatureIds,
    ) -> ragged_ids.FeatureIds:
        """Returns the input of feature `index`, of the size declared.

        A size known only at run time is checked then, by an
        `InvalidArgumentError`.

        Raises:
          ValueError: If it has another size.
        """
        self._settle_inner(index, inputs.inner_shape)
        expected = self._declared(index)
        if expected is None:
            return inputs
        message = (f"Input {self._spec.features[index].name!r} must have "
                   f"{expected} samples, as `build` or its FeatureConfig "
                   "was told.")
        if inputs.static_num_samples is None:
            check = tf.debugging.assert_equal(
                tf.cast(inputs.num_samples, tf.int64),
                tf.constant(expected, tf.int64), message)
            with tf.control_dependencies([] if check is None else [check]):
                inputs.num_samples = tf.identity(inputs.num_samples)
        elif inputs.static_num_samples != expected:
            raise ValueError(
                f"{message} Received: {inputs.static_num_samples}.")
        return inputs

    def activation_shape(self, index: int) -> tf.TensorShape:
        """Returns the shape of the activations of feature `index`."""
        feature = self._spec.features[index]
        positions = [feature.max_sequence_length] * feature.is_sequence
        inner = self._inner[index] or ()
        first = self._declared(index)
        if first is not None and inner:
            first //= math.prod(inner)
        return tf.TensorShape([first, *inner, *positions,
                               self._spec.table_of(feature).dim])

    def shape_activations(self, index: int, activations: tf.Tensor):
        """Returns what the engine gave, `[num_samples, ...]`, in its shape."""
        inner = self._inner[index]
        shape = self.activation_shape(index)
        if inner:
            activations = tf.reshape(
                activations, [-1, *inner, activations.shape[-1]])
        return tf.ensure_shape(activations, shape)

    def flatten_gradient(self, index: int, gradient: tf.Tensor) -> tf.Tensor:
        """Returns a gradient in the shape that the engine takes."""
        if not self._inner[index]:
            return gradient
        return tf.reshape(gradient, [-1, gradient.shape[-1]])

    def _settle_inner(self, index: int, inner: tuple[int | None, ...]):
        """Takes the sizes of the first input; refuses others later."""
        name = self._spec.features[index].name
        if self._inner[index] is None:
            if None in inner or 0 in inner:
                raise ValueError(
                    f"Input {name!r} must have sizes above 0 that are known "
                    "while tracing, but for the first and the last; give its "
                    "FeatureConfig an `output_shape`, or `build` its shape. "
                    f"Received: {list(inner)} between them.")
            self._inner[index] = inner
            return
        known = self._inner[index]
        if len(inner) != len(known) or any(
                one not in (None, other) for one, other in zip(inner, known)):
            raise ValueError(
                f"Input {name!r} must have samples of shape "
                f"{['?', *known]}, as its FeatureConfig, `build` or the first "
                f"step said. Received: {['?', *inner]}.")

    def note_dequeued(self, replica: int, activations: list[tf.Tensor]):
        """Remembers the sizes of the step that a replica has dequeued."""
        self._dequeued[replica] = (_graph(), [
            one.shape[0] if one.shape[0] is not None else tf.shape(one)[0]
            for one in activations])

    def dequeued_shape(self, replica: int, index: int) -> list[Any]:
        """Returns the activations' shape, of sizes and scalar tensors.

        Raises:
          ValueError: If the step was dequeued in another function.
        """
        shape = self.activation_shape(index).as_list()
        if shape[0] is None:
            graph, num_samples = self._dequeued.get(replica, (None, None))
            if num_samples is None or not _is_reachable(graph):
                raise ValueError(
                    "The gradient of feature "
                    f"{self._spec.features[index].name!r} is None and its "
                    "number of samples is not known here; pass zeros, or "
                    "give `build` the batch size.")
            shape[0] = num_samples[index]
        return shape

    def _declared(self, index: int) -> int | None:
        if self._num_samples is not None:
            return self._num_samples[index]
        return _count(self._spec.features[index].output_shape or (None,))


def read_num_samples(
    feature_config: Any, features: tuple[config.FeatureSpec, ...],
    shapes: Any, batch_size: int | None,
) -> list[tuple[int | None, ...]] | None:
    """Reads the arguments of `build`; None when they say nothing.

    Returns:
      For each feature the shape of its samples: that of the input without
      the last dimension, which is combined.
    """
    if isinstance(shapes, int) and not isinstance(shapes, bool):
        shapes, batch_size = None, shapes
    if shapes is None:
        if batch_size is None:
            return None
        if not isinstance(batch_size, int) or isinstance(
                batch_size, bool) or batch_size < 1:
            raise ValueError(
                "A per-replica batch size must be an int of at least 1. "
                f"Received: {batch_size!r}.")
        return [(batch_size,)] * len(features)
    try:
        flat = tf.__internal__.nest.flatten_up_to(feature_config, shapes)
    except (TypeError, ValueError) as error:
        raise type(error)(
            "Argument `per_replica_input_shapes` must have the structure of "
            f"`feature_config`. Received: {shapes}.") from error
    found = []
    for feature, shape in zip(features, flat):
        shape = tf.TensorShape(shape)
        if not shape.rank or (shape.rank > 2 and feature.is_sequence):
            raise ValueError(
                "A per-replica input shape must be [num_samples] or "
                "[..., ids per sample], of rank 2 at most for a sequence "
                f"feature. Received: {shape} (feature {feature.name!r}).")
        found.append(tuple(shape.as_list()[:max(shape.rank - 1, 1)]))
    return found


def _count(shape: tuple[int | None, ...]) -> int | None:
    """The samples of a shape; None where a size is unknown."""
    return None if None in shape else math.prod(shape)


def _graph():
    """The graph being traced; None when executing eagerly."""
    return None if tf.executing_eagerly() else (
        tf.compat.v1.get_default_graph())


def _is_reachable(graph) -> bool:
    """Whether a tensor of `graph` can be used where we are.

    Sizes seen eagerly must not be used in a function: they would be traced
    as constants, and be wrong for the next batch.
    """
    here = _graph()
    while here is not None and here is not graph:
        here = getattr(here, "outer_graph", None)
    return here is graph and (graph is not None or tf.executing_eagerly())
