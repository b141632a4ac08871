"""The shapes of samples: as features and `build` say, or the first step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

from absl import logging

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import build_shapes
from tf_layoutmap.embedding.step.build_shapes import Shape, is_known


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
