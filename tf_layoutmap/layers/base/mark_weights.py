"""The interface between a mark weight and the tables of its layer.

A layer has a mark weight if an engine trains its tables; see `steps.py`. The
mark weights of the Keras versions are in `layers/keras3/step_weight.py` and
`layers/tf_keras/tpu_embedding.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.table_access import LayerAccess


class MarkedTables(Protocol):
    """The tables of a layer with a mark weight.

    `EmbeddingSteps` and `KeyTable` implement the interface.
    """

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        ...

    @property
    def table_names(self) -> list[str]:
        """Names of the tables. Empty if the layer itself is the table."""
        ...

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the mark weight."""
        ...

    @property
    def variable_device(self) -> str:
        """Device of the mark weight."""
        ...

    @property
    def num_replicas(self) -> int:
        """Number of replicas of each step."""
        ...

    @property
    def can_accumulate(self) -> bool:
        """Whether `apply` can be called in a `tf.cond`."""
        ...

    @property
    def has_copies(self) -> bool:
        """Whether this process can copy the tables now."""
        ...

    def apply(self, sum_of_marks: tf.Tensor) -> None:
        """Applies a step. `sum_of_marks` is the gradient of the mark weight."""

    def save(self, store: Any) -> None:
        """Writes all variables of the tables to a dict."""

    def load(self, store: Any) -> None:
        """Reads what `save` wrote."""


class AccessedTables:
    """Base class of `MarkedTables` whose tables a `TPUEmbedding` holds.

    Attributes:
      access: Access to the `TPUEmbedding`.
    """

    access: LayerAccess

    @property
    def has_ordered_steps(self) -> bool:
        """Whether TPU programs contain the steps, which have one call each."""
        return self.access.has_ordered_steps

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the mark weight."""
        return self.access.mark_shape

    @property
    def variable_device(self) -> str:
        """Device of the mark weight."""
        return self.access.variable_device

    @property
    def num_replicas(self) -> int:
        """Number of replicas of each step."""
        return self.access.num_replicas


# The tables of a layer with a mark weight are not Keras weights. `get_weights`
# returns a small array with a copy of the tables, and `set_weights` restores
# the copy, so that callbacks such as EarlyStopping restore the best weights.


class _MarksWithTables(np.ndarray):
    """Value of a mark weight, with a copy of the tables.

    The copy belongs to this object. It is not written to files, and a copy of
    the array does not have it.
    """

    tables: dict[str, np.ndarray] | None = None


def marks_with_tables(
    marked_tables: MarkedTables, value: np.ndarray | None = None
) -> np.ndarray:
    """Returns the value of a weight, which holds a copy of the tables.

    If this process cannot copy the tables, the result holds no copy.

    Args:
      marked_tables: The tables.
      value: Value of the weight. By default, zeros of `mark_shape`.
    """
    if value is None:
        value = np.zeros(marked_tables.mark_shape, np.float32)
    if not marked_tables.has_copies:
        return value
    store: dict[str, Any] = {}
    marked_tables.save(store)
    # The array owns its memory. A view of the array, such as the result of
    # `np.asarray`, therefore has the array as its base.
    marks = _MarksWithTables(value.shape, np.float32)
    marks[...] = value
    marks.tables = {key: np.array(value) for key, value in store.items()}
    return marks


def tables_in(value: Any) -> dict[str, np.ndarray] | None:
    """Returns the copy that an array of `get_weights` holds, or None."""
    for array in (value, getattr(value, "base", None)):
        if isinstance(array, _MarksWithTables):
            return array.tables
    return None


def missing_gradient_message(layer: str, tables: Sequence[str]) -> str:
    """Returns the error message for a step without gradients for a table.

    If a weight has no gradient, Keras itself only prints a warning, and trains
    the other weights.

    Args:
      layer: Name of the layer, or path of its weight.
      tables: Names of the layer's tables. Empty if the layer itself is the
        table.
    """
    subject = f"Layer {layer!r}" + (
        f" (tables {', '.join(map(repr, tables))})" if tables else ""
    )
    traced = " (call the layer there with training=True)" * bool(tables)
    return (
        f"{subject} got no gradient in this training step, so its tables would "
        "not be trained. Likely causes: the layer was not called in this "
        "step, or outside of the `tf.GradientTape`; the loss does not depend "
        "on its output, or only through `tf.stop_gradient` or an operation "
        "without a gradient; or it was called in a concrete function that was "
        f"traced outside of the tape{traced}. For a step without this "
        "layer remove its weight from the arguments of the optimizer; for "
        "tables that must not be trained set `trainable = False` of the layer "
        "before `compile`."
    )
