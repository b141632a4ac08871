"""The shapes of what goes into a step, and of what comes out of it."""

# DOC-MERGE: The shapes of samples: as features and `build` say, or the first step.
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
from tf_layoutmap.embedding.spec import config


class SampleShapes:
    """What is known of the samples of each feature.

    Attributes:
      features: The features as the engine has them: a sequence feature whose
        activations have the shape of inputs with more dimensions has no
        sequences there.
    """

    def __init__(self, features: tuple[config.FeatureSpec, ...]):
        """Takes the features as they were given."""
        self._given = features
        self.features = list(features)
        self._is_fixed = False
        # One per feature, once `declare` said so; None in it: any size.
        self._declared: list[Shape] | None = None
        # Sizes of samples behind the first dimension, which later steps must
        # have too; unknown until the feature, `build` or an input tells.
        self._inner: list[tuple[int, ...] | None] = [
            None
            if one.output_shape is None
            else cast("tuple[int, ...]", one.output_shape[1:])
            for one in features
        ]

    def fix(self) -> tuple[config.FeatureSpec, ...]:
        """Returns the features for the engine, which keeps them."""
        self._is_fixed = True
        return tuple(self.features)

    def declare_arguments(
        self, feature_config: Any, shapes: Any, batch_size: int | None
    ):
        """Declares what `build` was told, if anything.

        Args:
          feature_config: Nested structure of features.
          shapes: As of `build_shapes.read_arguments`.
          batch_size: Of every feature, or None.
        """
        declared = build_shapes.read_arguments(
            feature_config, self._given, shapes, batch_size
        )
        if declared is not None:
            self._declare(declared)

    def _declare(self, shapes: list[Shape]):
        """Holds every later step to these shapes of samples.

        Raises:
          ValueError: If others were declared before, or contradict the
            `output_shape` of a feature.
        """
        declared = []
        for feature, shape in zip(self._given, shapes):
            if feature.output_shape is not None:
                build_shapes.check(feature, feature.output_shape, shape)
                # The shape of the feature comes first, as in TensorFlow.
                shape = build_shapes.merge(feature.output_shape, shape)
            declared.append(shape)
        if self._declared is not None:
            before, now = (
                [_count(one) for one in shapes]
                for shapes in (self._declared, declared)
            )
            if before != now:
                raise ValueError(
                    "`build` was called with per-replica batch sizes "
                    f"{before}. Received: {now}."
                )
        self._take(
            {
                index: shape[1:]
                for index, shape in enumerate(declared)
                if self._given[index].output_shape is None
            }
        )
        self._declared = declared

    def take(self, index: int, inner: Shape):
        """Takes the sizes of an input of feature `index`.

        Args:
          index: Of the feature.
          inner: Sizes of its samples behind the first dimension.

        Raises:
          ValueError: If they are others than declared, or than those of the
            first input; or not known, or too late.
        """
        self._take({index: inner})

    def take_flat(self):
        """Takes inputs of all features, whose samples have no inner sizes."""
        self._take(dict.fromkeys(range(len(self.features)), ()))

    def inner(self, index: int) -> tuple[int, ...]:
        """Returns the sizes of samples behind the first dimension."""
        return self._inner[index] or ()

    def known(self, index: int) -> Shape | None:
        """Returns the shape that was declared, if one was."""
        if self._declared is not None:
            return self._declared[index]
        return self._given[index].output_shape

    def num_samples(self, index: int) -> int | None:
        """Returns how many samples each step has, if that was declared."""
        return _count(self.known(index) or (None,))

    def combines_places(self, index: int) -> bool:
        """Whether a sequence feature is none in the engine."""
        return not self.features[index].is_sequence

    def _take(self, sizes: dict[int, Shape]):
        # All are checked before the first is taken.
        for index, inner in sizes.items():
            self._check(index, inner)
            self._check_sequence(index, inner)
        for index, inner in sizes.items():
            self._settle(index, inner)

    def _check(self, index: int, inner: Shape):
        """Refuses other sizes than those of the first input."""
        name = self._given[index].name
        known = self._inner[index]
        if known is None:
            if None in inner or 0 in inner:
                raise ValueError(
                    f"Input {name!r} must have sizes above 0 that are known "
                    "while tracing, but for the first and the last; give its "
                    "FeatureConfig an `output_shape`, or `build` its shape. "
                    f"Received: {list(inner)} between them."
                )
        elif len(inner) != len(known) or any(
            one not in (None, other) for one, other in zip(inner, known)
        ):
            raise ValueError(
                f"Input {name!r} must have samples of shape "
                f"{['?', *known]}, as its FeatureConfig, `build` or the first "
                f"step said. Received: {['?', *inner]}."
            )

    def _check_sequence(self, index: int, inner: Shape):
        """Refuses more dimensions where the engine has sequences already."""
        feature = self.features[index]
        if inner and feature.is_sequence and self._is_fixed:
            raise ValueError(
                f"Input {feature.name!r} of a sequence feature must be of rank "
                "2, as when the engine was made; for more dimensions call "
                "`build` with its shape before the first step. Received: "
                f"samples of shape {['?', *inner]}."
            )

    def _settle(self, index: int, inner: Shape):
        """Takes the sizes of the first input."""
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
    """The samples of a shape; None where a size is unknown."""
    return math.prod(shape) if is_known(shape) else None


class StepShapes:
    """Reads inputs, and shapes activations and gradients as these ask.

    Attributes:
      samples: What is known of the samples of each feature.
    """

    def __init__(self, spec: config.EmbeddingSpec):
        self._spec = spec
        self.samples = SampleShapes(spec.features)
        # Per replica: the graph of its last dequeue, and samples by feature.
        self._dequeued: dict[int, tuple[Any, list[Any]]] = {}

    def fix_spec(self) -> config.EmbeddingSpec:
        """Returns the spec for the engine, which keeps it."""
        return dataclasses.replace(self._spec, features=self.samples.fix())

    def take_spec(self, spec: config.EmbeddingSpec) -> None:
        """Takes a spec whose features are the same, and tables are not."""
        self._spec = spec

    @property
    def has_open_tables(self) -> bool:
        """Whether ids of some tables are keys."""
        return self._spec.has_open_tables

    def read_input(
        self,
        index: int,
        value: Any,
        weight: Any,
    ) -> embedding_inputs.FeatureIds:
        """Returns the input of feature `index` as the engine takes it.

        A size known only at run time is checked then, by an
        `InvalidArgumentError`.

        Raises:
          TypeError, ValueError: As `ragged_ids.read_feature`, and if it has
            another shape than declared.
        """
        feature = self._spec.features[index]
        read = (
            embedding_inputs.read_feature
            if self._spec.table_of(feature).vocabulary is None
            else embedding_inputs.read_keys
        )
        inputs = read(feature, value, weight)
        if feature.is_sequence:
            if self.samples.combines_places(index) and not inputs.inner_shape:
                inputs = embedding_inputs.fill_sequences(
                    feature, inputs, feature.max_sequence_length
                )
        elif isinstance(value, tf.RaggedTensor):
            shape = self.samples.known(index)
            if shape is not None and len(shape) > 1:
                inputs = embedding_inputs.fill_samples(feature, inputs, shape)
        self.samples.take(index, inputs.inner_shape)
        inputs.num_samples = self._check_num_samples(
            index, self.samples.num_samples(index), inputs.num_samples
        )
        return inputs

    def check_packed(
        self,
        packed: packing.PackedIds,
    ) -> packing.PackedIds:
        """Returns a packed batch, whose samples have no inner dimensions.

        Raises:
          ValueError: If it has another size than declared.
        """
        self.samples.take_flat()
        num_samples = packed.num_samples
        # The same size is declared of most features: it is checked once.
        for expected, index in {
            self.samples.num_samples(index): index
            for index in reversed(range(len(self._spec.features)))
        }.items():
            num_samples = self._check_num_samples(index, expected, num_samples)
        return dataclasses.replace(packed, num_samples=num_samples)

    def _check_num_samples(
        self, index: int, expected: int | None, num_samples: Any
    ) -> Any:
        """Returns the number of samples, which must be the expected one."""
        if expected is None:
            return num_samples
        message = (
            f"Input {self._spec.features[index].name!r} must have "
            f"{expected} samples, as `build` or its FeatureConfig "
            "was told."
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
        """Returns what the engine gave, `[num_samples, ...]`, in shape."""
        return [
            self._shape_activations(index, one)
            for index, one in enumerate(activations)
        ]

    def _shape_activations(self, index: int, activations: tf.Tensor):
        inner = self.samples.inner(index)
        shape = self._activation_shape(index)
        if inner:
            activations = tf.reshape(
                activations, [-1, *inner, activations.shape[-1]]
            )
        found = activations.shape
        if found.rank == shape.rank and all(
            size in (None, known) for size, known in zip(shape, found)
        ):
            return activations  # An operation less, for each feature.
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
        """Returns the gradients of the step dequeued last, as the core wants.

        Args:
          replica: Whose step it is.
          gradients: One per feature; None for zeros.
        """
        return [
            self._flatten(
                index,
                steps.zero_gradient(
                    self._spec.features[index],
                    self._dequeued_shape(replica, index),
                ),
            )
            if gradient is None
            else self._flat_gradient(index, gradient)
            for index, gradient in enumerate(gradients)
        ]

    def flat_gradients_of_call(
        self,
        gradients: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the gradients of a lookup out of the order of steps."""
        return [
            self._flat_gradient(index, gradient)
            for index, gradient in enumerate(gradients)
        ]

    def _flat_gradient(self, index: int, gradient: Any) -> tf.Tensor:
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

    def note_dequeued(self, replica: int, activations: list[tf.Tensor]):
        """Remembers the sizes of the step that a replica has dequeued."""
        sizes = [
            one.shape[0] if one.shape[0] is not None else tf.shape(one)[0]
            for one in activations
        ]
        self._dequeued[replica] = (
            next(tf_private.graphs_around(), None),
            sizes,
        )

    def _dequeued_shape(self, replica: int, index: int) -> list[Any]:
        """Returns the activations' shape, of sizes and scalar tensors.

        Raises:
          ValueError: If the step was dequeued in another function.
        """
        shape = self._activation_shape(index).as_list()
        if shape[0] is None:
            graph, num_samples = self._dequeued.get(replica, (None, None))
            if num_samples is None or not _is_reachable(graph):
                raise ValueError(
                    "The gradient of feature "
                    f"{self._spec.features[index].name!r} is None and its "
                    "number of samples is not known here; pass zeros, or "
                    "give `build` the batch size."
                )
            shape[0] = num_samples[index]
        return shape


def _is_reachable(graph) -> bool:
    """Whether a tensor of `graph` can be used where we are.

    Sizes seen eagerly must not be used in a function: they would be traced
    as constants, and be wrong for the next batch.
    """
    if graph is None:
        return tf.executing_eagerly()
    return any(graph is one for one in tf_private.graphs_around())
