"""The model in plain Keras, and the layouts of its weights."""

from __future__ import annotations

import keras
import tensorflow as tf

import tf_layoutmap as tlm
from transformer.settings import Settings

dtensor = tf.experimental.dtensor

# Keys are the name of a layer and the name of an attribute. Weights without a
# key, such as the weights of normalization layers, are replicated. Attention
# heads, hidden units of MLPs and their weights are sharded over "model". The
# only communication of a block is therefore two sums over the devices.
LAYOUTS = {
    r"tokens.embeddings": (None, "model"),
    r"positions.table": (None, "model"),
    r"attend_\d+.(query|key|value)_dense.kernel": (None, "model", None),
    r"attend_\d+.(query|key|value)_dense.bias": ("model", None),
    r"attend_\d+.output_dense.kernel": ("model", None, None),
    r"widen_\d+.kernel": (None, "model"),
    r"widen_\d+.bias": ("model",),
    r"narrow_\d+.kernel": ("model", None),
    r"guess.kernel": ("model", None),
}


@keras.saving.register_keras_serializable("sharded_transformer")
class Positions(keras.layers.Layer):
    """Layer that adds a trainable row to each position."""

    def build(self, shape):
        """Creates one row per position."""
        self.table = self.add_weight(
            name="table",
            shape=shape[1:],
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )

    def call(self, x):
        """Adds the rows to `x`, `[batch, positions, dim]`."""
        return x + self.table


def layout_map_of(mesh) -> tlm.LayoutMap:
    """Returns a layout map with the layouts of all sharded weights."""
    layout_map = tlm.LayoutMap(mesh)
    for key, axes in LAYOUTS.items():
        layout_map[key] = dtensor.Layout(
            [axis or dtensor.UNSHARDED for axis in axes], mesh
        )
    return layout_map


def build_model(settings: Settings, num_rows: int) -> keras.Model:
    """Returns an untrained model. The code does not refer to the mesh.

    Returns:
      A model from `[batch, context]` rows of characters to `[batch, context,
      num_rows]` scores of the next character at each position.
    """
    keras.utils.set_random_seed(settings.seed)
    layers = keras.layers
    rows = keras.Input((settings.context,), dtype="int32")
    x = layers.Embedding(num_rows, settings.dim, name="tokens")(rows)
    x = Positions(name="positions")(x)
    for block in range(settings.num_blocks):
        seen = layers.LayerNormalization(name=f"before_attend_{block}")(x)
        x = x + layers.MultiHeadAttention(
            settings.num_heads,
            settings.dim // settings.num_heads,
            name=f"attend_{block}",
        )(seen, seen, use_causal_mask=True)
        seen = layers.LayerNormalization(name=f"before_widen_{block}")(x)
        wide = layers.Dense(4 * settings.dim, "relu", name=f"widen_{block}")(
            seen
        )
        x = x + layers.Dense(settings.dim, name=f"narrow_{block}")(wide)
    x = layers.LayerNormalization(name="before_guess")(x)
    return keras.Model(
        rows, layers.Dense(num_rows, name="guess")(x), name="transformer"
    )


def compile_model(model: keras.Model, settings: Settings) -> None:
    """Compiles the model in the same way as any Keras model."""
    model.compile(
        keras.optimizers.Adam(settings.rate, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def held_bytes(model: keras.Model) -> tuple[int, int]:
    """Returns the sizes of weights and optimizer variables in bytes.

    Returns:
      The bytes on the device that holds the most, and the bytes of one
      unsharded copy.
    """
    per_device, once = {}, 0
    for variable in (*model.variables, *model.optimizer.variables):
        parts = dtensor.unpack(variable.value.read_value())
        for device, part in enumerate(parts):
            per_device[device] = per_device.get(device, 0) + part.numpy().nbytes
        once += variable.numpy().nbytes
    return max(per_device.values()), once
