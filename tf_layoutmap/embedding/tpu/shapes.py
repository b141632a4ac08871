"""Shapes of activations, which a TPU requires before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap.embedding import build_shapes
from tf_layoutmap.embedding.build_shapes import Shape
from tf_layoutmap.embedding.configs import config


class OutputShapes:
    """The shape of each feature's activations, without `dim`.

    A shape has three possible sources. `output_shape` of the FeatureConfig has
    precedence over the arguments of `build`. The arguments of `build` have
    precedence over the inputs of the first step.
    """

    def __init__(self, features: Sequence[config.FeatureSpec]):
        self._features = features
        self._shapes: list[Shape | None] = [
            feature.output_shape for feature in features
        ]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all features, which are known after `settle`."""
        return [shape or () for shape in self._shapes]

    def settled(self) -> list[tuple[int, ...]]:
        """Returns the shapes of all features, which `settle` has set."""
        return cast("list[tuple[int, ...]]", self.shapes)

    def settle(self, incoming: Sequence[Shape] | None):
        """Sets unknown shapes from `incoming`.

        Raises:
          ValueError: If a shape contradicts the known shape, or if a shape is
            still unknown.
        """
        if incoming is not None:
            self.check(incoming)
            self._shapes = [
                build_shapes.merge(known, new)
                for known, new in zip(self._shapes, incoming)
            ]
        for feature, shape in zip(self._features, self._shapes):
            if shape is None or None in shape:
                raise ValueError(
                    "A TPU requires the full shape of every activation. The "
                    f"output shape of feature {feature.name!r} is {shape}; "
                    "enqueue inputs with a known batch size (batch a dataset "
                    "with drop_remainder=True), set `output_shape` of the "
                    "FeatureConfig, or call `build` with the shapes of one "
                    "replica's inputs."
                )

    def check(
        self, incoming: Sequence[Shape], is_ragged: Sequence[bool] | None = None
    ):
        """Checks the shapes of one step against the known shapes.

        Args:
          incoming: Shapes that `input_shape` returned.
          is_ragged: For each input, whether it is ragged. None if this is
            unknown. The samples of a ragged input can fill an output shape with
            more dimensions.

        Raises:
          ValueError: If a shape contradicts the known shape.
        """
        for index, (feature, known, new) in enumerate(
            zip(self._features, self._shapes, incoming)
        ):
            if known is None:
                continue
            build_shapes.check(
                feature,
                known,
                new,
                may_be_ragged=is_ragged is None or is_ragged[index],
            )


def input_shape(
    feature: config.FeatureSpec,
    value: Any,
    num_cores: int | None,
) -> Shape:
    """Returns the activations' shape, without `dim`, for one input.

    Args:
      feature: Spec of the feature to which the input belongs.
      value: A dense, sparse or ragged tensor.
      num_cores: Number of cores over which the samples are split, or None.

    Raises:
      ValueError: If the rank or the shape of `value` is not supported.
    """
    if isinstance(value, tf.RaggedTensor):
        kind, at_least = "Ragged", 2
    elif isinstance(value, tf.SparseTensor):
        kind, at_least = "Sparse", 2
    else:
        kind, at_least = "Dense", 1
    rank = value.shape.rank
    if rank is None or rank < at_least or (kind == "Ragged" and rank != 2):
        raise ValueError(
            f"{kind} input {feature.name!r} must have a known rank of "
            f"{at_least}{'' if kind == 'Ragged' else ' or more'} under "
            f"TPUStrategy. Received: shape {value.shape}."
        )
    sizes = tuple(value.shape.as_list())
    if kind == "Dense":
        if rank > 1 and sizes[-1] != 1:
            raise ValueError(
                f"Dense input {feature.name!r} of rank 2 or more must have 1 "
                "as its last dimension, because ids are combined along this "
                "dimension; pass several ids per sample as a tf.RaggedTensor "
                f"or tf.SparseTensor. Received: shape {value.shape}."
            )
        if feature.is_sequence:
            raise ValueError(
                f"Input {feature.name!r} of a sequence feature must be a "
                "tf.RaggedTensor or tf.SparseTensor under TPUStrategy. "
                f"Received: a dense tensor of shape {value.shape}."
            )
    sizes = sizes[: max(rank - 1, 1)]
    if num_cores and sizes[0] is not None:
        if sizes[0] % num_cores:
            raise ValueError(
                f"The number of samples of input {feature.name!r} must be a "
                f"multiple of {num_cores}, the number of cores of a replica. "
                f"Received: {sizes[0]} samples."
            )
        sizes = (sizes[0] // num_cores, *sizes[1:])
    return build_shapes.with_positions(feature, sizes)
