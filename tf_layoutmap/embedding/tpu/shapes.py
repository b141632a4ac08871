"""The shapes of activations, which a TPU must know before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap.embedding import build_shapes
from tf_layoutmap.embedding.build_shapes import Shape
from tf_layoutmap.embedding.spec import config


class OutputShapes:
    """Of each feature, the shape of its activations without `dim`.

    A FeatureConfig's `output_shape` comes first, then what `build` was told,
    then what the inputs of the first step have.
    """

    def __init__(self, features: Sequence[config.FeatureSpec]):
        self._features = features
        self._shapes: list[Shape | None] = [
            one.output_shape for one in features
        ]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes; all known once `settle` has passed."""
        return [one or () for one in self._shapes]

    def settled(self) -> list[tuple[int, ...]]:
        """Returns the shapes, once `settle` has passed."""
        return cast("list[tuple[int, ...]]", self.shapes)

    def settle(self, incoming: Sequence[Shape] | None):
        """Takes the shapes that are not known yet.

        Raises:
          ValueError: If one contradicts what is known, or stays unknown.
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
                    "A TPU needs the full shape of every activation. The "
                    f"output shape of feature {feature.name!r} is {shape}; "
                    "enqueue inputs with a known batch size (batch a dataset "
                    "with drop_remainder=True), give the FeatureConfig an "
                    "`output_shape`, or call `build` with the shapes of one "
                    "replica's inputs."
                )

    def check(
        self, incoming: Sequence[Shape], is_ragged: Sequence[bool] | None = None
    ):
        """Holds the shapes of one step to what is known.

        Args:
          incoming: Shapes as of `of_input`.
          is_ragged: Whether each input is ragged, whose samples may be laid
            out over an output shape of more dimensions; None if unknown.

        Raises:
          ValueError: If a shape contradicts.
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


def of_input(
    feature: config.FeatureSpec,
    value: Any,
    num_cores: int | None,
) -> Shape:
    """Returns the output shape of one input of a replica.

    Args:
      feature: Whose input it is.
      value: A dense, sparse or ragged tensor.
      num_cores: The cores that divide its samples among them, or None.

    Raises:
      ValueError: If it is of no known type, rank or form.
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
            f"{kind} input {feature.name!r} must be of a known rank of "
            f"{at_least}{'' if kind == 'Ragged' else ' or more'} under "
            f"TPUStrategy. Received: shape {value.shape}."
        )
    sizes = tuple(value.shape.as_list())
    if kind == "Dense":
        if rank > 1 and sizes[-1] != 1:
            raise ValueError(
                f"Dense input {feature.name!r} of rank 2 or more must have 1 "
                "as its last dimension, which is combined; pass several ids "
                "per sample as a tf.RaggedTensor or tf.SparseTensor. "
                f"Received: shape {value.shape}."
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
                f"The samples of input {feature.name!r} must divide evenly "
                f"among the {num_cores} cores of a replica. Received: "
                f"{sizes[0]} samples."
            )
        sizes = (sizes[0] // num_cores, *sizes[1:])
    return build_shapes.with_positions(feature, sizes)
