"""The mask of ids that are strings, in models that Keras 3 draws up first."""

from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.layers.steps import key_table


@keras.saving.register_keras_serializable("tf_layoutmap")
class KeyMask(keras.Operation):
    """Whether ids are no padding; `keras.ops.not_equal` takes no strings."""

    def call(self, ids: Any) -> tf.Tensor:
        """Returns booleans of the shape of `ids`."""
        return key_table.is_no_padding(tf.convert_to_tensor(ids))

    def compute_output_spec(self, ids: Any) -> keras.KerasTensor:
        """Returns the same as a `KerasTensor`."""
        return keras.KerasTensor(ids.shape, dtype="bool")
