"""The shapes of what goes into a step, and of what comes out of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.host.sample_shapes import SampleShapes
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import (
    feature_inputs,
    packed_ids,
    sample_positions,
)
from tf_layoutmap.embedding.step import gradients as step_gradients


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
    ) -> feature_inputs.FeatureIds:
        """Returns the input of feature `index` as the engine takes it.

        A size known only at run time is checked then, by an
        `InvalidArgumentError`.

        Raises:
          TypeError, ValueError: As `ragged_ids.read_feature`, and if it has
            another shape than declared.
        """
        feature = self._spec.features[index]
        read = (
            feature_inputs.read_feature
            if self._spec.table_of(feature).vocabulary is None
            else feature_inputs.read_keys
        )
        inputs = read(feature, value, weight)
        if feature.is_sequence:
            if self.samples.combines_places(index) and not inputs.inner_shape:
                inputs = sample_positions.fill_sequences(
                    feature, inputs, feature.max_sequence_length
                )
        elif isinstance(value, tf.RaggedTensor):
            shape = self.samples.known(index)
            if shape is not None and len(shape) > 1:
                inputs = sample_positions.fill(feature, inputs, shape)
        self.samples.take(index, inputs.inner_shape)
        inputs.num_samples = self._check_num_samples(
            index, self.samples.num_samples(index), inputs.num_samples
        )
        return inputs

    def check_packed(
        self,
        packed: packed_ids.PackedIds,
    ) -> packed_ids.PackedIds:
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
                step_gradients.zero_gradient(
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
            step_gradients.read_gradient(
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
            next(_tf_private.graphs_around(), None),
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
    return any(graph is one for one in _tf_private.graphs_around())
