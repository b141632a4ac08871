"""The Keras 3 weight of a table with an open vocabulary on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private, tf_private
from tf_layoutmap.layers.base import mark_weights
from tf_layoutmap.layers.base.key_table import KeyTable
from tf_layoutmap.layers.keras3.step_weight import StepWeight
from tf_layoutmap.layout.keras3.context import is_planning


class KeyTableWeight(StepWeight):
    """A table with an open vocabulary, whose gradient contains its rows.

    Checkpoints contain the table as part of the layer's `TPUEmbedding`. For
    this weight, they contain the mark weight of earlier versions, which is
    always zero.
    """

    def __init__(self, table: KeyTable):
        """Creates the weight of a built table."""
        self._table = table
        super().__init__(table, name="embeddings")

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the table, `[num_rows, dim]`."""
        return tf.TensorShape(self._table.rows.shape)

    @property
    def value(self) -> Any:
        """The rows, or the value that `stateless_call` passes."""
        passed = keras_private.stateless_value(self)
        if passed is not None:
            return passed
        if self._value is None or is_planning.get():
            return super().value
        return self._table.open_rows

    @property
    def handle(self) -> Any:
        # A tape watches the object that this property returns.
        in_export = tf_private.in_save_context()
        return self._value.handle if in_export else self._table.open_rows

    def numpy(self) -> np.ndarray:
        """Returns the rows, with a copy of the keys, for `get_weights`."""
        return mark_weights.marks_with_tables(
            self._table, self._table.rows.numpy()
        )

    def __repr__(self) -> str:
        return f"<KeyTableWeight path={self.path} shape={tuple(self.shape)}>"

    # `tf.train.Checkpoint` and `tf.saved_model` handle this weight like the
    # mark weight.

    def _serialize_to_tensors(self) -> Any:
        return self._value._serialize_to_tensors()

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        del restored_tensors
        self.discard_accumulated()
        return self._value

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        self._value._copy_trackable_to_cpu(object_map)
        object_map[self] = object_map[self._value]

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any
    ) -> Any:
        handles = self._value._export_to_saved_model_graph(
            object_map, tensor_map, options, **kwargs
        )
        object_map[self] = object_map[self._value]
        return handles

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        self._value._write_object_proto(proto, options)

    @property
    def _shared_name(self) -> str:
        return self._value._shared_name
