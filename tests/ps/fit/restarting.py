"""Program whose `fit` restarts the program; test_fit.py starts it.

python -m tests.ps.fit.restarting FOLDER keras|tf_keras

Each step applies the gradient 1 to one row of a table. The program prints the
row at the beginning of each epoch. With Keras 3, the program pauses during its
second backup before the first restart. The program ends after an epoch if the
file FOLDER/stop exists.
"""

import importlib
import json
import os
import pathlib
import sys
import time

import tensorflow as tf

import tf_layoutmap as tlm
from tests.ps.train import RATE, ROW

tpu = tf.tpu.experimental.embedding
# `sys.argv` has other arguments if pytest imports this file.
KERAS = "tf_keras" if "tf_keras" in sys.argv[1:] else "keras"
keras = importlib.import_module(KERAS)
layers = tlm.layers if KERAS == "keras" else tlm.layers.tf_keras
NUM_STEPS = 30
IS_FIRST_LIFE = "TF_LAYOUTMAP_RESTARTS" not in os.environ
HALF_WRITTEN = 2


class Layer(layers.TPUEmbedding):
    """Layer that pauses when it is saved for the second time."""

    num_saved = 0

    def save_own_variables(self, store):
        super().save_own_variables(store)
        self.num_saved += 1
        if IS_FIRST_LIFE and self.num_saved == HALF_WRITTEN:
            print("WRITING", flush=True)
            time.sleep(8)
            # Simulates a longer save: reads from both servers.
            print("READS", row_of(self), flush=True)


def row_of(layer):
    (rows,) = layer.embedding_tables.values()
    return rows.numpy()[ROW].tolist()


def model(strategy):
    with strategy.scope():
        inputs = {"a": keras.Input([1], dtype="int64", name="a")}
        layer = Layer(
            {
                "a": tpu.FeatureConfig(
                    tpu.TableConfig(
                        8, 4, initializer=tf.zeros_initializer(), name="a"
                    ),
                    name="a",
                )
            },
            tpu.SGD(RATE),
            partitioner=tlm.partitioners.FixedShardsPartitioner(2),
        )
        built = keras.Model(inputs, layer(inputs)["a"])
        built.compile("sgd", loss=lambda y, x: tf.reduce_sum(x, axis=1))
    return built, layer


def endless():
    return tf.data.Dataset.from_tensors(
        ({"a": tf.constant([[ROW]], tf.int64)}, tf.zeros([1, 4]))
    ).repeat()


class PrintRow(keras.callbacks.Callback):
    """Callback that prints the row, and ends training if FOLDER/stop exists."""

    def __init__(self, folder, layer):
        super().__init__()
        self.folder = folder
        self.layer = layer
        self.num_epochs = 0

    def on_epoch_begin(self, epoch, logs=None):
        life = "FIRST" if IS_FIRST_LIFE else "LATER"
        print(life, json.dumps([epoch, row_of(self.layer)]), flush=True)

    def on_epoch_end(self, epoch, logs=None):
        self.num_epochs = epoch + 1
        self.model.stop_training = (self.folder / "stop").exists()


def main(folder: pathlib.Path):
    strategy = tlm.ps.connect()
    built, layer = model(strategy)
    print_row = PrintRow(folder, layer)
    built.fit(
        tlm.ps.Datasets(endless, on_server_loss="restart"),
        epochs=10_000,
        steps_per_epoch=NUM_STEPS,
        verbose=0,
        callbacks=[
            print_row,
            keras.callbacks.BackupAndRestore(folder / "backup"),
        ],
    )
    print(
        "FOUND "
        + json.dumps(
            {"num_epochs": print_row.num_epochs, "row": row_of(layer)}
        ),
        flush=True,
    )
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
