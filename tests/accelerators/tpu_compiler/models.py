"""The models whose functions are compiled for TPUs.

The sizes are multiples of the tiles in which a TPU stores arrays, so that
padding does not hide the predicted sizes, and small enough to compile in
seconds. Ids are int32, because TensorFlow's all-reduce for TPUs lacks int64.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tf_layoutmap as tlm

layers = keras.layers

BATCH = 32
LENGTH, WIDTH, VOCABULARY = 64, 256, 1024
CLASSES = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
      make: Function that returns the model.
      inputs: Function of a random generator that returns a batch of inputs.
      labels: Shape of a batch of labels.
      num_classes: Number of classes, or 0 if the labels are floats.
      generates: Whether the model generates text.
    """

    make: Callable[[], keras.Model]
    inputs: Callable[[np.random.Generator], Any]
    labels: tuple[int, ...] = (BATCH,)
    num_classes: int = CLASSES
    generates: bool = False

    def loss(self) -> Any:
        if self.num_classes:
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def batch(self) -> tuple[Any, np.ndarray]:
        """Returns a batch of inputs and its labels."""
        random = np.random.default_rng(0)
        labels = random.integers(0, self.num_classes or 2, self.labels)
        labels = labels.astype("int32" if self.num_classes else "float32")
        return self.inputs(random), labels


def images(size: int) -> Callable[[np.random.Generator], np.ndarray]:
    def inputs(random):
        return random.normal(size=[BATCH, size, size, 3]).astype(np.float32)

    return inputs


def tokens(random: np.random.Generator) -> np.ndarray:
    return random.integers(1, VOCABULARY, [BATCH, LENGTH], np.int32)


def decoder() -> keras.Model:
    # Only this model requires keras-hub.
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        dropout=0.0,
        max_sequence_length=LENGTH,
    )
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def decoder_inputs(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "token_ids": tokens(random),
        "padding_mask": np.ones([BATCH, LENGTH], bool),
    }


def transformer_block(x: Any, number: int) -> Any:
    y = layers.LayerNormalization(name=f"before_attention_{number}")(x)
    x += layers.MultiHeadAttention(4, WIDTH // 4, name=f"attention_{number}")(
        y, y
    )
    y = layers.LayerNormalization(name=f"before_mlp_{number}")(x)
    y = layers.Dense(4 * WIDTH, "gelu", name=f"widen_{number}")(y)
    return x + layers.Dense(WIDTH, name=f"narrow_{number}")(y)


def encoder() -> keras.Model:
    ids = keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(ids)
    for number in range(2):
        x = transformer_block(x, number)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(ids, layers.Dense(CLASSES, name="classes")(x))


def vision_transformer() -> keras.Model:
    x = image = keras.Input([64, 64, 3])
    x = layers.Conv2D(WIDTH, 8, strides=8, name="patches")(x)
    x = layers.Reshape([64, WIDTH])(x)
    for number in range(2):
        x = transformer_block(x, number)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(image, layers.Dense(CLASSES, name="classes")(x))


def convolutions() -> keras.Model:
    model = [keras.Input([32, 32, 3])]
    for number, filters in enumerate((128, 256, 256)):
        model += [
            layers.Conv2D(filters, 3, padding="same", name=f"conv_{number}"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
    model += [
        layers.GlobalAveragePooling2D(),
        layers.Dense(CLASSES, name="classes"),
    ]
    return keras.Sequential(model)


def recurrent() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([LENGTH], dtype="int32"),
            layers.Embedding(VOCABULARY, WIDTH, name="tokens"),
            layers.LSTM(WIDTH, name="lstm"),
            layers.Dense(CLASSES, name="classes"),
        ]
    )


def experts() -> keras.Model:
    """A mixture of experts: each token uses two of four experts."""
    ids = keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(ids)
    gates = layers.Softmax()(layers.Dense(4, name="gates")(x))
    values, chosen = keras.ops.top_k(gates, 2)
    weights = keras.ops.sum(
        keras.ops.one_hot(chosen, 4) * keras.ops.expand_dims(values, -1), 2
    )
    hidden = layers.EinsumDense(
        "bld,edh->bleh", [LENGTH, 4, 2 * WIDTH], "relu", name="widen"
    )(x)
    y = layers.EinsumDense("bleh,ehd->bled", [LENGTH, 4, WIDTH], name="narrow")(
        hidden
    )
    x += keras.ops.einsum("bled,ble->bld", y, weights)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, layers.Dense(CLASSES, name="classes")(x))


FEATURES = ("user", "item", "category")
NUM_NUMBERS, ROWS, ROW_WIDTH = 16, 4096, 128


def dense_part(numbers: Any, rows: list[Any]) -> Any:
    """Returns the output of a DLRM for the rows of its features."""
    bottom = layers.Dense(256, "relu", name="bottom_0")(numbers)
    bottom = layers.Dense(ROW_WIDTH, "relu", name="bottom_1")(bottom)
    pairs = tlm.layers.DotInteraction()([bottom, *rows])
    top = layers.Concatenate()([bottom, pairs])
    top = layers.Dense(256, "relu", name="top_0")(top)
    return layers.Dense(1, name="top_1")(top)


def dlrm() -> keras.Model:
    numbers = keras.Input([NUM_NUMBERS], name="numbers")
    ids = {name: keras.Input([], dtype="int32", name=name) for name in FEATURES}
    rows = [
        tlm.layers.ShardedEmbedding(
            ROWS, ROW_WIDTH, optimizer="adagrad", name=f"table_{name}"
        )(ids[name])
        for name in FEATURES
    ]
    return keras.Model({"numbers": numbers, **ids}, dense_part(numbers, rows))


def dlrm_inputs(random: np.random.Generator) -> dict[str, np.ndarray]:
    numbers = random.normal(size=[BATCH, NUM_NUMBERS]).astype(np.float32)
    ids = {
        name: random.integers(0, ROWS, [BATCH], np.int32) for name in FEATURES
    }
    return {"numbers": numbers, **ids}


CASES = {
    "decoder": Case(
        decoder,
        decoder_inputs,
        labels=(BATCH, LENGTH),
        num_classes=VOCABULARY,
        generates=True,
    ),
    "encoder": Case(encoder, tokens),
    "CNN": Case(convolutions, images(32)),
    "LSTM": Case(recurrent, tokens),
    "mixture of experts": Case(experts, tokens),
    "DLRM": Case(dlrm, dlrm_inputs, labels=(BATCH, 1), num_classes=0),
    "ViT": Case(vision_transformer, images(64)),
}
