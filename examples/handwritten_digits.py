"""Learns to read handwritten digits with a sharded embedding table.

    pip install scikit-learn
    python examples/handwritten_digits.py
    python examples/handwritten_digits.py --picture=curve.svg

The data is real and public: 1,797 images of 8x8 pixels from 13 people, the
"Optical Recognition of Handwritten Digits" data of the UCI repository, which
scikit-learn contains. Nothing is downloaded. Each square of 2x2 pixels, with
three levels of gray, is an id, so an image consists of 49 ids. The model sums
the rows of these ids. Images that are shifted by one pixel are additional
training examples. The program prints the learning curve: the accuracy after
each epoch, in training and on a quarter of the images, on which the model was
not trained.
"""

from __future__ import annotations

import os
import sys

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from completion.report import Report

_EPOCHS = flags.DEFINE_integer("epochs", 15, "Epochs.", lower_bound=1)
_SHARDS = flags.DEFINE_integer(
    "shards", 4, "Shards of the table.", lower_bound=1, upper_bound=64
)
_SEED = flags.DEFINE_integer(
    "seed", 7, "Seed of the split and of the initial weights.", lower_bound=0
)
_PICTURE = flags.DEFINE_string(
    "picture", None, "File for a picture of the learning curve (matplotlib)."
)

# Levels of gray of a pixel.
_LEVELS = 3
_SQUARES = 7 * 7
_ROWS = _SQUARES * _LEVELS**4
_DIM = 32


def load():
    """Returns the images `[1797, 8, 8]` and their digits `[1797]`."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        sys.exit(
            "error: the images are in the package scikit-learn, which is not "
            "installed. Install it: pip install scikit-learn"
        )
    pixels, digits = datasets.load_digits(return_X_y=True)
    return pixels.reshape(-1, 8, 8), digits.astype("int64")


def ids_of(images):
    """Returns the ids of the 49 squares of each image, `[num_images, 49]`.

    >>> import numpy as np
    >>> ids_of(np.zeros([1, 8, 8]))[0, :3].tolist()
    [0, 81, 162]
    """
    import numpy as np

    # A pixel is a number from 0 to 16.
    levels = (images * _LEVELS // 17).astype(np.int64)
    squares = np.zeros([len(images), 7, 7], np.int64)
    for y in (0, 1):
        for x in (0, 1):
            corner = levels[:, y : y + 7, x : x + 7]
            squares = _LEVELS * squares + corner
    return squares.reshape(-1, _SQUARES) + _LEVELS**4 * np.arange(_SQUARES)


def with_shifts(images):
    """Returns the images, followed by copies that are shifted by one pixel."""
    import numpy as np

    padded = np.pad(images, [(0, 0), (1, 1), (1, 1)])
    return np.concatenate(
        [
            padded[:, y : y + 8, x : x + 8]
            for y, x in ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
        ]
    )


def split(count: int, seed: int):
    """Returns the indices of the training and of the held-out images.

    >>> training, held_out = split(8, seed=1)
    >>> len(training), len(held_out), len({*training, *held_out})
    (6, 2, 8)
    """
    import numpy as np

    order = np.random.default_rng(seed).permutation(count)
    return order[count // 4 :], order[: count // 4]


def nearest_neighbor_accuracy(images, digits, training, held_out) -> float:
    """Returns the accuracy of the digit of the most similar training image."""
    import numpy as np

    pixels = images.reshape(-1, 64)
    known, unknown = pixels[training], pixels[held_out]
    distances = (
        np.sum(unknown**2, axis=1)[:, None]
        + np.sum(known**2, axis=1)
        - 2 * unknown @ known.T
    )
    nearest = digits[training][np.argmin(distances, axis=1)]
    return float(np.mean(nearest == digits[held_out]))


def build(num_shards: int):
    """Returns the compiled model from 49 ids to ten logits."""
    import keras

    import tf_layoutmap as tlm

    ids = keras.Input([_SQUARES], dtype="int64", name="ids")
    rows = tlm.layers.ShardedEmbedding(
        _ROWS,
        _DIM,
        num_shards=num_shards,
        optimizer="model",
        name="squares",
    )(ids)
    # Training leaves out half of the squares of each image at random.
    rows = keras.layers.Dropout(0.5, noise_shape=(None, _SQUARES, 1))(rows)
    x = keras.ops.sum(rows, axis=1)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dense(64, activation="relu")(x)
    model = keras.Model(ids, keras.layers.Dense(10)(x))
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def run(
    report: Report, *, epochs: int, num_shards: int, seed: int
) -> dict[str, list[float]]:
    """Trains the model, prints its learning curve, and returns the curve."""
    # The imports take seconds. They follow the flag checks, so that invalid
    # flags are reported without delay.
    import keras
    import numpy as np

    images, digits = load()
    training, held_out = split(len(images), seed)
    shifted = with_shifts(images[training])
    report.say(
        f"{len(training):,} images to train on ({len(shifted):,} with shifted "
        f"copies), {len(held_out):,} held out. The table has {_ROWS:,} rows in "
        f"{num_shards} shards."
    )
    keras.utils.set_random_seed(seed)
    model = build(num_shards)

    def say_progress(epoch, logs):
        report.say(
            f"epoch {epoch + 1} of {epochs}: accuracy {logs['accuracy']:.3f} "
            f"in training, {logs['val_accuracy']:.3f} on held-out images"
        )

    history = model.fit(
        ids_of(shifted),
        np.tile(digits[training], len(shifted) // len(training)),
        batch_size=64,
        epochs=epochs,
        validation_data=(ids_of(images[held_out]), digits[held_out]),
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=say_progress)],
        verbose=0,
    ).history
    nearest = nearest_neighbor_accuracy(images, digits, training, held_out)
    report.table(
        "Held-out images",
        ["model", "accuracy"],
        [
            ["sharded table", f"{history['val_accuracy'][-1]:.3f}"],
            ["nearest training image", f"{nearest:.3f}"],
        ],
        numbers=["accuracy"],
    )
    report.print_summary()
    return history


def draw(history: dict[str, list[float]]):
    """Returns a figure with the learning curve."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.2))
    epochs = range(1, len(history["accuracy"]) + 1)
    axes.plot(epochs, history["accuracy"], label="training", color="#1f5fa8")
    axes.plot(
        epochs, history["val_accuracy"], label="held out", color="#b3541e"
    )
    axes.set(xlabel="epoch", ylabel="accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    return figure


def main(argv: list[str]) -> None:
    """Trains the model, and draws its learning curve."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    history = run(
        Report(),
        epochs=_EPOCHS.value,
        num_shards=_SHARDS.value,
        seed=_SEED.value,
    )
    if _PICTURE.value:
        draw(history).savefig(_PICTURE.value)


if __name__ == "__main__":
    app.run(main)
