"""A variable on a mesh that does not divide its rows.

The DTensor behind it has rows of padding at its end, which nobody is shown:
shape, reads, files and exports are those of the rows there are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.variables import checkpoint_files
from tf_layoutmap.layout.variables.checkpointed_variable import StoredVariable

dtensor = tf.experimental.dtensor


class PaddedVariable(StoredVariable):
    """A `dtensor.DVariable` whose last rows are padding."""

    _num_rows: int | None = None

    @classmethod
    def of(cls, value: Any, num_rows: int, **options: Any) -> PaddedVariable:
        """Returns a variable.

        Args:
          value: DTensor with rows of padding.
          num_rows: Rows there are; those behind them are padding.
          **options: Those of `DVariable`.
        """
        variable = cls(value, **options)
        variable._num_rows = num_rows
        return variable

    @property
    def shape(self) -> tf.TensorShape:
        """That of the rows there are."""
        return tf.TensorShape([self._num_rows]).concatenate(self._shape[1:])

    def with_padding(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of a traced function with the padding at its end."""
        missing = self._shape[0] - self._num_rows
        return tf.pad(value, [[0, missing]] + [[0, 0]] * (self._shape.rank - 1))

    def read_divided(self) -> Any:
        """Returns the DTensor as devices hold it, with its padding."""
        return super()._read_variable_op()

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        value = super()._read_variable_op(no_copy)
        if self._num_rows is None or _tf_private.in_save_context():
            return value  # It is being made; or has no padding in an export.
        # Whole on each device: no mesh divides what is left.
        return dtensor.relayout(
            value, dtensor.Layout.replicated(self.layout.mesh, self._shape.rank)
        )[: self._num_rows]

    # Reads of some rows, which go by the handle: ids must not name padding.

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        if _tf_private.in_save_context():
            return super().sparse_read(indices, name)
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        if _tf_private.in_save_context():
            return super().gather_nd(indices, name)
        return tf.gather_nd(self.read_value(), indices, name=name)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        if not checkpoint_files.are_slices():
            raise ValueError(
                f"Variable {self.name!r} has {self._num_rows} rows, which its "
                "mesh does not divide: save it by tf.train.Checkpoint, not "
                "by a DTensorCheckpoint."
            )
        return super()._gather_saveables_for_checkpoint()

    def _export_to_saved_model_graph(
        self,
        object_map: Any,
        tensor_map: Any,
        options: Any,
        **kwargs: Any,
    ) -> Any:
        del options, kwargs
        variable = object_map[self] = _tf_private.UninitializedVariable(
            shape=self.shape,
            dtype=self.dtype,
            name=self._shared_name,
            trainable=self.trainable,
        )
        tensor_map[self.handle] = variable.handle
        return [self.handle]
