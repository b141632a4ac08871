"""Writes checkpoints in the older format of TensorFlow's class."""

import tensorflow as tf

from tf_layoutmap._core import tf_private


class OldEmbedding(tf.Module):
    """Module with the variables of an embedding, and an empty entry.

    TensorFlow's class used the empty entry as a hook for saves and restores.
    """

    def __init__(self, values: dict):
        """Creates variables from arrays with names such as `"table/slot"`."""
        super().__init__()
        by_table = {}
        for name, value in values.items():
            table, _, slot = name.partition("/")
            by_table.setdefault(table, {})[slot or "parameters"] = tf.Variable(
                value
            )
        self._variables = by_table

    def _gather_saveables_for_checkpoint(self):
        return {"TPUEmbedding_saveable": _Hook}


class _Hook(tf_private.SaveableObject):
    def __init__(self, name=""):
        nothing = tf.constant("")
        super().__init__(
            nothing,
            [tf_private.SaveSpec(nothing, "", name, dtype=tf.string)],
            name,
        )

    def restore(self, restored_tensors, restored_shapes):
        raise AssertionError("These files are only written.")
