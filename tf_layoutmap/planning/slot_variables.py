"""Shapes of the slot variables that an optimizer creates for a weight."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

# Sizes of the dimensions of a small variable. They are different primes, so
# that each dimension of a slot variable shows from which dimension it was
# created.
_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A slot variable of a weight.

    Attributes:
      dims: Dimension of the weight whose size each dimension of the slot
        variable has; None for a dimension of size 1.
      itemsize: Bytes per element.
    """

    dims: tuple[int | None, ...]
    itemsize: int

    def num_bytes(
        self, shape: tuple[int, ...], local_shape: tuple[int, ...]
    ) -> int:
        """Returns the bytes per device.

        A slot variable with the shape of the weight has the layout of the
        weight. Other slot variables are replicated.

        Args:
          shape: Shape of the weight.
          local_shape: Shape of the shard of the weight on each device.
        """
        is_like_weight = self.dims == tuple(range(len(shape)))
        sizes = local_shape if is_like_weight else shape
        return self.itemsize * math.prod(
            1 if d is None else sizes[d] for d in self.dims
        )


class SlotVariables:
    """The slot variables of an optimizer.

    A copy of the optimizer is built for a small variable of each rank.

    Attributes:
      fixed_bytes: Bytes of the variables that do not belong to a weight, such
        as the learning rate.
    """

    def __init__(self, optimizer: Any):
        """Initializes the object.

        Args:
          optimizer: Optimizer of Keras 3, its name, or its config.

        Raises:
          TypeError: If `optimizer` is not an optimizer of Keras 3.
        """
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError as error:
            raise TypeError(
                "Argument `optimizer` must be an optimizer of Keras 3 or its "
                f"name. Received: optimizer={optimizer!r}."
            ) from error
        self._class = type(optimizer)
        self._config = keras.saving.serialize_keras_object(optimizer)
        self._slots: dict[tuple[int, str], tuple[Slot, ...]] = {}
        # Some variables that do not belong to a weight are created in `build`.
        self.fixed_bytes = sum(_num_bytes(v) for v in self._built([]).variables)

    def _built(self, variables: list[keras.Variable]) -> Any:
        """Returns a copy of the optimizer that is built for variables."""
        # The function removes entries of the config.
        optimizer = keras.optimizers.deserialize(
            copy.deepcopy(self._config),
            custom_objects={self._class.__name__: self._class},
        )
        optimizer.build(variables)
        return optimizer

    def of_weight(self, rank: int, dtype: str) -> tuple[Slot, ...]:
        """Returns the slot variables of a trainable weight."""
        if (rank, dtype) not in self._slots:
            sizes = _SIZES[:rank]

            def count(num_weights: int) -> collections.Counter[Slot]:
                weights = [
                    keras.Variable(tf.zeros(sizes, dtype), dtype=dtype)
                    for _ in range(num_weights)
                ]
                return collections.Counter(
                    Slot(
                        tuple(
                            sizes.index(size) if size in sizes else None
                            for size in v.shape
                        ),
                        tf.as_dtype(v.dtype).size,
                    )
                    for v in self._built(weights).variables
                )

            # The other variables do not depend on the number of weights.
            slots = count(2) - count(1)
            self._slots[rank, dtype] = tuple(slots.elements())
        return self._slots[rank, dtype]


def _num_bytes(variable: Any) -> int:
    return math.prod(tuple(variable.shape)) * tf.as_dtype(variable.dtype).size
