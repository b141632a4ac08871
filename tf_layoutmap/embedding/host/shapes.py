"""How many samples the inputs of a step have, as far as it is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf
from absl import logging

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import (
    build_shapes,
    feature_inputs,
    packed_ids,
    sample_positions,
)
from tf_layoutmap.embedding.step import gradients as step_gradients
from tf_layoutmap.embedding.step.build_shapes import Shape, is_known


class StepShapes:
    """Sizes that `build` was told, and those of the steps dequeued."""

    def __init__(self, spec: config.EmbeddingSpec):
        self._spec = spec
        # As the engine has them: a sequence feature whose activations have
        # the shape of inputs with more dimensions has no sequences there.
        self._features = list(spec.features)
        self._is_fixed = False
        # One per feature, once `declare` said so; None in it: any size.
        self._declared_shapes: list[Shape] | None = None
        # Sizes of samples behind the first dimension, which later steps must
        # have too; unknown until the feature, `build` or an input tells.
        self._inner: list[tuple[int, ...] | None] = [
            None if one.output_shape is None else
            cast("tuple[int, ...]", one.output_shape[1:])
            for one in spec.features]
        # Per replica: the graph of its last dequeue, and samples by feature.
        self._dequeued: dict[int, tuple[Any, list[Any]]] = {}

    def fix_spec(self) -> config.EmbeddingSpec:
        """Returns the spec for the engine, which keeps it."""
        self._is_fixed = True
        return dataclasses.replace(self._spec, features=tuple(self._features))

    def take_spec(self, spec: config.EmbeddingSpec) -> None:
        """Takes a spec whose features are the same, and tables are not."""
        self._spec = spec

    def declare_arguments(self, feature_config: Any, shapes: Any,
                          batch_size: int | None):
        """Declares what `build` was told, if anything.

        Args:
          feature_config: Nested structure of features.
          shapes: As of `build_shapes.read_arguments`.
          batch_size: Of every feature, or None.
        """
        declared = build_shapes.read_arguments(
            feature_config, self._spec.features, shapes, batch_size)
        if declared is not None:
            self.declare(declared)

    def declare(self, shapes: list[Shape]):
        """Holds every later step to these shapes of samples.

        Raises:
          ValueError: If others were declared before, or contradict the
            `output_shape` of a feature.
        """
        declared = []
        for feature, shape in zip(self._spec.features, shapes):
            if feature.output_shape is not None:
                build_shapes.check(feature, feature.output_shape, shape)
                # The shape of the feature comes first, as in TensorFlow.
                shape = build_shapes.merge(feature.output_shape, shape)
            declared.append(shape)
        if self._declared_shapes is not None:
            before, now = ([_count(one) for one in shapes] for shapes in (
                self._declared_shapes, declared))
            if before != now:
                raise ValueError(
                    "`build` was called with per-replica batch sizes "
                    f"{before}. Received: {now}.")
        for index, shape in enumerate(declared):
            if self._spec.features[index].output_shape is None:
                self._check_inner(index, shape[1:])
                self._check_sequence(index, shape[1:])
        for index, shape in enumerate(declared):
            if self._spec.features[index].output_shape is None:
                self._settle_inner(index, shape[1:])
        self._declared_shapes = declared

    def read_input(
        self, index: int, value: Any, weight: Any,
    ) -> feature_inputs.FeatureIds:
        """Returns the input of feature `index` as the engine takes it.

        A size known only at run time is checked then, by an
        `InvalidArgumentError`.

        Raises:
          TypeError, ValueError: As `ragged_ids.read_feature`, and if it has
            another shape than declared.
        """
        feature = self._spec.features[index]
        read = (feature_inputs.read_feature
                if self._spec.table_of(feature).vocabulary is None
                else feature_inputs.read_keys)
        inputs = read(feature, value, weight)
        if feature.is_sequence:
            if self._combines_places(index) and not inputs.inner_shape:
                inputs = sample_positions.fill_sequences(
                    feature, inputs, feature.max_sequence_length)
        elif isinstance(value, tf.RaggedTensor):
            shape = self._known_shape(index)
            if shape is not None and len(shape) > 1:
                inputs = sample_positions.fill(feature, inputs, shape)
        self._check_inner(index, inputs.inner_shape)
        self._check_sequence(index, inputs.inner_shape)
        self._settle_inner(index, inputs.inner_shape)
        return self._check_size(index, inputs)

    @property
    def features(self) -> list[config.FeatureSpec]:
        """The features as the engine has them."""
        return self._features

    @property
    def has_open_tables(self) -> bool:
        """Whether ids of some tables are keys."""
        return self._spec.has_open_tables

    def check_packed(
        self, packed: packed_ids.PackedIds,
    ) -> packed_ids.PackedIds:
        """Returns a packed batch, whose samples have no inner dimensions.

        Raises:
          ValueError: If it has another size than declared.
        """
        num_samples = packed.num_samples
        for index in range(len(self._features)):
            self._check_inner(index, ())
            self._check_sequence(index, ())
        for index in range(len(self._features)):
            self._settle_inner(index, ())
        # The same size is declared of most features: it is checked once.
        for expected, index in {
                self._declared(index): index
                for index in reversed(range(len(self._features)))}.items():
            num_samples = self._check_num_samples(index, expected, num_samples)
        return dataclasses.replace(packed, num_samples=num_samples)

    def _check_size(
        self, index: int, inputs: feature_inputs.FeatureIds,
    ) -> feature_inputs.FeatureIds:
        inputs.num_samples = self._check_num_samples(
            index, self._declared(index), inputs.num_samples)
        return inputs

    def _check_num_samples(self, index: int, expected: int | None,
                           num_samples: Any) -> Any:
        """Returns the number of samples, which must be the expected one."""
        if expected is None:
            return num_samples
        message = (f"Input {self._spec.features[index].name!r} must have "
                   f"{expected} samples, as `build` or its FeatureConfig "
                   "was told.")
        if not isinstance(num_samples, int):
            check = tf.debugging.assert_equal(
                tf.cast(num_samples, tf.int64),
                tf.constant(expected, tf.int64), message)
            with tf.control_dependencies([] if check is None else [check]):
                return tf.identity(num_samples)
        if num_samples != expected:
            raise ValueError(f"{message} Received: {num_samples}.")
        return num_samples

    def activation_shape(self, index: int) -> tf.TensorShape:
        """Returns the shape of the activations of feature `index`."""
        feature = self._features[index]
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
        found = activations.shape
        if found.rank == shape.rank and all(
                size in (None, known) for size, known in zip(shape, found)):
            return activations  # An operation less, for each feature.
        return tf.ensure_shape(activations, shape)

    def shape_all_activations(
        self, activations: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the activations of all features in their shapes."""
        return [self.shape_activations(index, one)
                for index, one in enumerate(activations)]

    def flat_gradients(
        self, replica: int, gradients: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Returns the gradients of the step dequeued last, as the core wants.

        Args:
          replica: Whose step it is.
          gradients: One per feature; None for zeros.
        """
        return [
            self._flatten(index, step_gradients.zero_gradient(
                self._spec.features[index],
                self.dequeued_shape(replica, index)))
            if gradient is None else self._flat_gradient(index, gradient)
            for index, gradient in enumerate(gradients)]

    def flat_gradients_of_call(
        self, gradients: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the gradients of a lookup out of the order of steps."""
        return [self._flat_gradient(index, gradient)
                for index, gradient in enumerate(gradients)]

    def _flat_gradient(self, index: int, gradient: Any) -> tf.Tensor:
        return self._flatten(index, step_gradients.read_gradient(
            self._spec.features[index], gradient,
            self.activation_shape(index)))

    def _flatten(self, index: int, gradient: tf.Tensor) -> tf.Tensor:
        if not self._inner[index]:
            return gradient
        return tf.reshape(gradient, [-1, gradient.shape[-1]])

    def _check_inner(self, index: int, inner: Shape):
        """Refuses other sizes than those of the first input."""
        name = self._spec.features[index].name
        known = self._inner[index]
        if known is None:
            if None in inner or 0 in inner:
                raise ValueError(
                    f"Input {name!r} must have sizes above 0 that are known "
                    "while tracing, but for the first and the last; give its "
                    "FeatureConfig an `output_shape`, or `build` its shape. "
                    f"Received: {list(inner)} between them.")
        elif len(inner) != len(known) or any(
                one not in (None, other) for one, other in zip(inner, known)):
            raise ValueError(
                f"Input {name!r} must have samples of shape "
                f"{['?', *known]}, as its FeatureConfig, `build` or the first "
                f"step said. Received: {['?', *inner]}.")

    def _check_sequence(self, index: int, inner: Shape):
        """Refuses more dimensions where the engine has sequences already."""
        feature = self._features[index]
        if inner and feature.is_sequence and self._is_fixed:
            raise ValueError(
                f"Input {feature.name!r} of a sequence feature must be of rank "
                "2, as when the engine was made; for more dimensions call "
                "`build` with its shape before the first step. Received: "
                f"samples of shape {['?', *inner]}.")

    def _settle_inner(self, index: int, inner: Shape):
        """Takes the sizes of the first input."""
        if self._inner[index] is not None:
            return
        self._inner[index] = cast("tuple[int, ...]", inner)
        feature = self._features[index]
        if inner and feature.is_sequence:
            logging.warning(
                "`max_sequence_length` of feature %s is ignored for inputs of "
                "rank %d: ids are combined.", feature.name, 2 + len(inner))
            self._features[index] = dataclasses.replace(
                feature, max_sequence_length=0)

    def _combines_places(self, index: int) -> bool:
        """Whether a sequence feature is none in the engine."""
        return not self._features[index].is_sequence

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
        return _count(self._known_shape(index) or (None,))

    def _known_shape(self, index: int) -> Shape | None:
        if self._declared_shapes is not None:
            return self._declared_shapes[index]
        return self._spec.features[index].output_shape


def _count(shape: Shape) -> int | None:
    """The samples of a shape; None where a size is unknown."""
    return math.prod(shape) if is_known(shape) else None


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
