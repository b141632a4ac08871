"""Programs on time series: forecasts, anomalies, text recognition."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RNG = np.random.default_rng(0)
SERIES = np.sin(np.arange(160)[:, None] / np.array([3.0, 5.0, 7.0])).astype(
    np.float32
) + 0.1 * RNG.normal(size=(160, 3)).astype(np.float32)
IMAGES = RNG.uniform(size=(16, 32, 8, 1)).astype(np.float32)
WORDS = RNG.integers(0, 10, (16, 3)).astype(np.float32)


def forecasting():
    """Predicts the next value from windows of a dataset."""
    dataset = keras.utils.timeseries_dataset_from_array(
        SERIES[:-8], SERIES[8:, :1], sequence_length=8, batch_size=16
    )
    dataset = dataset.take(4)
    inputs = keras.Input((8, 3))
    x = layers.LSTM(16)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model.fit(dataset, epochs=3, verbose=0).history["loss"], [model]


def transformer_of_series():
    """Classifies time series by attention and convolutions of width 1."""
    x = inputs = keras.Input((16, 3))
    for _ in range(2):
        y = layers.MultiHeadAttention(2, 8)(x, x)
        y = residual = layers.LayerNormalization(epsilon=1e-6)(y) + x
        y = layers.Conv1D(8, 1, activation="relu")(y)
        y = layers.Conv1D(3, 1)(y)
        x = layers.LayerNormalization(epsilon=1e-6)(y) + residual
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    x = layers.Dropout(0.2, seed=5)(layers.Dense(16, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    model.compile(
        keras.optimizers.Adam(1e-3),
        "sparse_categorical_crossentropy",
        metrics=["sparse_categorical_accuracy"],
    )
    windows = np.stack([SERIES[i : i + 16] for i in range(64)])
    labels = (windows.mean((1, 2)) > 0).astype(np.int64)
    return model.fit(
        windows, labels, batch_size=16, epochs=3, shuffle=False, verbose=0
    ).history["loss"], [model]


def anomalies():
    """Detects anomalies by the reconstruction error of an autoencoder."""
    model = keras.Sequential(
        [
            keras.Input((16, 3)),
            layers.Conv1D(8, 7, padding="same", strides=2, activation="relu"),
            layers.Dropout(0.2, seed=6),
            layers.Dense(16, activation="relu"),
            layers.Conv1DTranspose(
                8, 7, padding="same", strides=2, activation="relu"
            ),
            layers.Conv1D(3, 7, padding="same"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    windows = np.stack([SERIES[i : i + 16] for i in range(64)])
    losses = model.fit(
        windows, windows, epochs=3, batch_size=16, shuffle=False, verbose=0
    ).history["loss"]
    errors = np.abs(model.predict(windows, verbose=0) - windows).mean((1, 2))
    return [*losses, float(errors.max())], [model]


class CTCLayer(layers.Layer):
    """Layer that adds the CTC loss of letters at unknown positions."""

    def call(self, y_true, y_pred):
        count = ops.shape(y_pred)[0]
        steps = ops.full((count,), y_pred.shape[1], dtype="int32")
        letters = ops.full((count,), y_true.shape[1], dtype="int32")
        loss = ops.nn.ctc_loss(
            ops.cast(y_true, "int32"), y_pred, letters, steps, mask_index=10
        )
        self.add_loss(ops.mean(loss))
        return y_pred


def reading_images():
    """Reads letters in an image with convolutions, LSTMs and CTC."""
    images = keras.Input((32, 8, 1), name="image")
    labels = keras.Input((3,), name="label")
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(images)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Reshape((16, 32))(x)
    x = layers.Dense(16, activation="relu")(x)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    outputs = CTCLayer()(labels, layers.Dense(11)(x))
    model = keras.Model([images, labels], outputs)
    model.compile(optimizer=keras.optimizers.Adam())
    dataset = tf.data.Dataset.from_tensor_slices(
        {"image": IMAGES, "label": WORDS}
    ).batch(8)
    return model.fit(dataset, epochs=3, verbose=0).history["loss"], [model]


PROGRAMS = [forecasting, transformer_of_series, anomalies, reading_images]
