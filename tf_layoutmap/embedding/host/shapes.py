"""The shapes of inputs, activations and gradients of a step.

`SampleShapes` records the shapes of samples. The features, `build` or the first
step set these shapes. `StepShapes` uses the shapes to read inputs, and to
reshape activations and gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import build_shapes, packing, steps
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding.build_shapes import Shape, is_known
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.vocabulary import key_tensors


class SampleShapes:
    """The known shapes of the samples of each feature.

    Attributes:
      features: The features in the form that the engine processes. If the
        inputs of a sequence feature have more than 2 dimensions, the engine
        combines their ids like the ids of other features.
    """

    def __init__(self, features: tuple[config.FeatureSpec, ...]):
        """Sets the known shapes to the output shapes of the features."""
        self._given = features
        self.features = list(features)
        self._is_fixed = False
        # One shape per feature, which `declare_arguments` sets. A size of None
        # in a shape allows any size.
        self._declared: list[Shape] | None = None
        # For each feature, the sizes of all sample dimensions except the first
        # one. All steps must have these sizes. An entry is None until the
        # feature, `build` or an input sets the sizes.
        self._inner: list[tuple[int, ...] | None] = [
            None
            if feature.output_shape is None
            else cast("tuple[int, ...]", feature.output_shape[1:])
            for feature in features
        ]

    def fix(self) -> tuple[config.FeatureSpec, ...]:
        """Prevents later changes of the features, and returns the features."""
        self._is_fixed = True
        return tuple(self.features)

    def declare_arguments(
        self, feature_config: Any, shapes: Any, batch_size: int | None
    ):
        """Declares the shapes that were passed to `build`, if there are any.

        Args:
          feature_config: Nested structure of features.
          shapes: Shapes in any form that `build_shapes.read_arguments` accepts.
          batch_size: Batch size of every feature, or None.
        """
        declared = build_shapes.read_arguments(
            feature_config, self._given, shapes, batch_size
        )
        if declared is not None:
            self._declare(declared)

    def _declare(self, shapes: list[Shape]):
        """Stores the shapes that the samples of all later steps must have.

        Raises:
          ValueError: If an earlier call declared other shapes, or if a shape
            contradicts the `output_shape` of its feature.
        """
        declared = []
        for feature, shape in zip(self._given, shapes):
            if feature.output_shape is not None:
                build_shapes.check(feature, feature.output_shape, shape)
                # As in TensorFlow, `output_shape` has precedence over the
                # arguments of `build`.
                shape = build_shapes.merge(feature.output_shape, shape)
            declared.append(shape)
        if self._declared is not None:
            before, now = (
                [_count(shape) for shape in shapes]
                for shapes in (self._declared, declared)
            )
            if before != now:
                raise ValueError(
                    "`build` was called with per-replica batch sizes "
                    f"{before}. Received: {now}."
                )
        self._set_inner_sizes(
            {
                index: shape[1:]
                for index, shape in enumerate(declared)
                if self._given[index].output_shape is None
            }
        )
        self._declared = declared

    def set_inner(self, index: int, inner: Shape):
        """Checks and sets the inner sizes of feature `index`.

        Args:
          index: Index of the feature.
          inner: Sizes of all sample dimensions except the first one.

        Raises:
          ValueError: If the sizes differ from the declared sizes or from the
            sizes of the first input, or if a size is unknown. The method also
            raises this error if the input of a sequence feature has more than 2
            dimensions and the engine already exists.
        """
        self._set_inner_sizes({index: inner})

    def set_all_flat(self):
        """Checks and sets the inner sizes of all features to `()`."""
        self._set_inner_sizes(dict.fromkeys(range(len(self.features)), ()))

    def inner(self, index: int) -> tuple[int, ...]:
        """Returns the sizes of all sample dimensions except the first one."""
        return self._inner[index] or ()

    def declared_shape(self, index: int) -> Shape | None:
        """Returns the declared shape of a feature's samples, or None."""
        if self._declared is not None:
            return self._declared[index]
        return self._given[index].output_shape

    def num_samples(self, index: int) -> int | None:
        """Returns the declared number of samples in each step, or None."""
        return _count(self.declared_shape(index) or (None,))

    def combines_positions(self, index: int) -> bool:
        """Returns whether the engine combines the ids of a sequence feature."""
        return not self.features[index].is_sequence

    def _set_inner_sizes(self, sizes: dict[int, Shape]):
        # All sizes are checked before any size is set, so an error does not
        # change the state.
        for index, inner in sizes.items():
            self._check(index, inner)
            self._check_sequence(index, inner)
        for index, inner in sizes.items():
            self._settle(index, inner)

    def _check(self, index: int, inner: Shape):
        """Checks that the sizes equal the sizes that are already set.

        If the feature has no sizes yet, the new sizes must be static and above
        0.
        """
        name = self._given[index].name
        known = self._inner[index]
        if known is None:
            if None in inner or 0 in inner:
                raise ValueError(
                    f"Input {name!r} must have static sizes above 0, except "
                    "for the first and the last dimension; set "
                    "`output_shape` of its FeatureConfig, or pass its shape "
                    f"to `build`. Received: sizes {list(inner)} between the "
                    "first and the last dimension."
                )
        elif len(inner) != len(known) or any(
            size not in (None, other) for size, other in zip(inner, known)
        ):
            raise ValueError(
                f"Input {name!r} must have samples of shape "
                f"{['?', *known]}, which its FeatureConfig, `build` or the "
                f"first step has set. Received: {['?', *inner]}."
            )

    def _check_sequence(self, index: int, inner: Shape):
        """Checks the rank of a sequence feature after the engine is created."""
        feature = self.features[index]
        if inner and feature.is_sequence and self._is_fixed:
            raise ValueError(
                f"Input {feature.name!r} of a sequence feature must have rank "
                "2, as at the creation of the engine; for more dimensions "
                "call `build` with its shape before the first step. Received: "
                f"samples of shape {['?', *inner]}."
            )

    def _settle(self, index: int, inner: Shape):
        """Sets the inner sizes of a feature, if they are not set yet."""
        if self._inner[index] is not None:
            return
        self._inner[index] = cast("tuple[int, ...]", inner)
        feature = self.features[index]
        if inner and feature.is_sequence:
            logging.warning(
                "`max_sequence_length` of feature %s is ignored for inputs of "
                "rank %d: ids are combined.",
                feature.name,
                2 + len(inner),
            )
            self.features[index] = dataclasses.replace(
                feature, max_sequence_length=0
            )


def _count(shape: Shape) -> int | None:
    """Returns the product of all sizes, or None if a size is unknown."""
    return math.prod(shape) if is_known(shape) else None


class StepShapes:
    """A converter between the shapes of user code and of the engine.

    The converter reads inputs, and reshapes activations and gradients.

    Attributes:
      samples: Known shapes of the samples of each feature.
    """

    def __init__(self, spec: config.EmbeddingSpec):
        self._spec = spec
        self.samples = SampleShapes(spec.features)
        # For each replica, the graph in which its last step was dequeued, and
        # for each feature the number of samples in that step. If the number is
        # unknown, the activations instead.
        self._dequeued: dict[int, tuple[Any, list[Any]]] = {}

    def fix_spec(self) -> config.EmbeddingSpec:
        """Prevents later changes of the features, and returns the spec."""
        return dataclasses.replace(self._spec, features=self.samples.fix())

    def replace_spec(self, spec: config.EmbeddingSpec) -> None:
        """Replaces the spec. The new spec must have the same features."""
        self._spec = spec

    @property
    def has_open_tables(self) -> bool:
        """Whether any table has an open vocabulary."""
        return self._spec.has_open_tables

    def has_keys(self) -> list[bool]:
        """Returns for each feature whether its table has an open vocabulary."""
        return self._spec.has_keys()

    def read_input(
        self,
        index: int,
        value: Any,
        weight: Any,
    ) -> embedding_inputs.FeatureIds:
        """Converts the input of feature `index` to the form of the engine.

        If the number of samples is unknown during tracing, it is checked at run
        time. The check raises `InvalidArgumentError`.

        Raises:
          TypeError: If `inputs.read_feature` raises a TypeError.
          ValueError: If `inputs.read_feature` raises a ValueError, or if the
            shape differs from the declared shape.
        """
        feature = self._spec.features[index]
        vocabulary = self._spec.table_of(feature).vocabulary
        inputs = (
            embedding_inputs.read_feature(feature, value, weight)
            if vocabulary is None
            else embedding_inputs.read_keys(
                feature,
                value,
                weight,
                keeps_strings=vocabulary.settings.keep_strings,
            )
        )
        value = key_tensors.ids_of(value)
        if feature.is_sequence:
            if (
                self.samples.combines_positions(index)
                and not inputs.inner_shape
            ):
                inputs = embedding_inputs.fill_sequences(
                    feature, inputs, feature.max_sequence_length
                )
        elif isinstance(value, tf.RaggedTensor):
            shape = self.samples.declared_shape(index)
            if shape is not None and len(shape) > 1:
                inputs = embedding_inputs.fill_samples(feature, inputs, shape)
        self.samples.set_inner(index, inputs.inner_shape)
        inputs.num_samples = self._check_num_samples(
            index, self.samples.num_samples(index), inputs.num_samples
        )
        return inputs

    def check_packed(
        self,
        packed: packing.PackedIds,
    ) -> packing.PackedIds:
        """Checks and returns a packed batch, which has one sample axis.

        Raises:
          ValueError: If the batch size differs from the declared batch size.
        """
        self.samples.set_all_flat()
        num_samples = packed.num_samples
        # Most features have the same declared size, so each distinct size is
        # checked only once.
        for expected, index in {
            self.samples.num_samples(index): index
            for index in reversed(range(len(self._spec.features)))
        }.items():
            num_samples = self._check_num_samples(index, expected, num_samples)
        return dataclasses.replace(packed, num_samples=num_samples)

    def _check_num_samples(
        self, index: int, expected: int | None, num_samples: Any
    ) -> Any:
        """Checks and returns the number of samples."""
        if expected is None:
            return num_samples
        message = (
            f"Input {self._spec.features[index].name!r} must have "
            f"{expected} samples, which `build` or its FeatureConfig "
            "has set."
        )
        if not isinstance(num_samples, int):
            check = tf.debugging.assert_equal(
                tf.cast(num_samples, tf.int64),
                tf.constant(expected, tf.int64),
                message,
            )
            with tf.control_dependencies([] if check is None else [check]):
                return tf.identity(num_samples)
        if num_samples != expected:
            raise ValueError(f"{message} Received: {num_samples}.")
        return num_samples

    def shape_all_activations(
        self,
        activations: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Reshapes activations of the engine to match the inputs of the step.

        Args:
          activations: One tensor `[num_samples, ...]` per feature.
        """
        return [
            self._shape_activations(index, activation)
            for index, activation in enumerate(activations)
        ]

    def _shape_activations(self, index: int, activations: tf.Tensor):
        inner = self.samples.inner(index)
        shape = self._activation_shape(index)
        if inner:
            activations = tf.reshape(
                activations, [-1, *inner, activations.shape[-1]]
            )
        static_shape = activations.shape
        if static_shape.rank == shape.rank and all(
            size in (None, known) for size, known in zip(shape, static_shape)
        ):
            return activations  # The shape is already static.
        return tf.ensure_shape(activations, shape)

    def _activation_shape(self, index: int) -> tf.TensorShape:
        feature = self.samples.features[index]
        positions = [feature.max_sequence_length] * feature.is_sequence
        inner = self.samples.inner(index)
        first = self.samples.num_samples(index)
        if first is not None:
            first //= math.prod(inner)
        return tf.TensorShape(
            [first, *inner, *positions, self._spec.table_of(feature).dim]
        )

    def flat_gradients(
        self,
        replica: int,
        gradients: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Reshapes gradients of the last dequeued step for the engine.

        Args:
          replica: Index of the replica of the step.
          gradients: One gradient per feature. None represents zeros.
        """
        return [
            self.flat_zeros(replica, index)
            if gradient is None
            else self.flat_gradient(index, gradient)
            for index, gradient in enumerate(gradients)
        ]

    def flat_zeros(self, replica: int, index: int) -> tf.Tensor:
        """Returns zeros as the gradient of feature `index`, for the engine."""
        return self._flatten(
            index,
            steps.zero_gradient(
                self._spec.features[index],
                self._dequeued_shape(replica, index),
            ),
        )

    def flat_gradients_of_call(
        self,
        gradients: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Reshapes gradients of an open lookup for the engine."""
        return [
            self.flat_gradient(index, gradient)
            for index, gradient in enumerate(gradients)
        ]

    def flat_gradient(self, index: int, gradient: Any) -> tf.Tensor:
        """Checks and reshapes the gradient of feature `index`."""
        return self._flatten(
            index,
            steps.read_gradient(
                self._spec.features[index],
                gradient,
                self._activation_shape(index),
            ),
        )

    def _flatten(self, index: int, gradient: tf.Tensor) -> tf.Tensor:
        if not self.samples.inner(index):
            return gradient
        return tf.reshape(gradient, [-1, gradient.shape[-1]])

    def record_dequeued(self, replica: int, activations: list[tf.Tensor]):
        """Records the numbers of samples in a replica's dequeued step.

        An unknown number is read only when a gradient is None. A trace with
        many features would otherwise have several unused ops per feature.
        """
        sizes = [
            activation.shape[0]
            if activation.shape[0] is not None
            else activation
            for activation in activations
        ]
        self._dequeued[replica] = (
            next(tf_private.graphs_around(), None),
            sizes,
        )

    def _dequeued_shape(self, replica: int, index: int) -> list[Any]:
        """Returns the shape of activations as ints and scalar tensors.

        Raises:
          ValueError: If the number of samples is unknown because another
            function dequeued the step.
        """
        shape: list[Any] = self._activation_shape(index).as_list()
        if shape[0] is None:
            graph, num_samples = self._dequeued.get(replica, (None, None))
            if num_samples is None or not _is_reachable(graph):
                raise ValueError(
                    "The gradient of feature "
                    f"{self._spec.features[index].name!r} is None and its "
                    "number of samples is not known here; pass zeros, or "
                    "pass the batch size to `build`."
                )
            size = num_samples[index]
            shape[0] = size if isinstance(size, int) else tf.shape(size)[0]
        return shape


def _is_reachable(graph) -> bool:
    """Returns whether a tensor of `graph` can be used in the current context.

    A size from an eager step must not be used in a traced function, because the
    function would contain the size as a constant. The constant would be wrong
    for the next batch.
    """
    if graph is None:
        return tf.executing_eagerly()
    return any(graph is other for other in tf_private.graphs_around())
