"""Compares predicted and measured step times of Keras models on a mesh.

    python -m benchmarks.plans.mesh

The devices of the meshes are logical CPUs.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks.plans import report

VOCABULARY, LENGTH = 8192, 8


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, a batch, and the mesh."""

    build: Callable[[], keras.Model]
    batch: tuple
    mesh: dict[str, int]
    optimizer: str


def _block(x, dim, heads, hidden):
    attention = keras.layers.MultiHeadAttention(
        heads, dim // heads, name="attention"
    )
    x = keras.layers.LayerNormalization(name="norm")(x + attention(x, x))
    y = keras.layers.Dense(hidden, activation="relu", name="up")(x)
    y = keras.layers.Dense(dim, name="down")(y)
    return keras.layers.LayerNormalization(name="last_norm")(x + y)


def decoder(dim=128, heads=4, hidden=512):
    """Returns a transformer layer between a table and an output head."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, dim, name="words")(tokens)
    x = _block(x, dim, heads, hidden)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="head")(x))


def recommender(users=30_000, items=4_000, dim=64):
    """Returns a model with two tables and two towers."""
    user = keras.Input((), dtype="int32")
    item = keras.Input((), dtype="int32")
    features = keras.Input((256,))
    x = keras.layers.Embedding(users, dim, name="users")(user)
    x = keras.layers.Concatenate()([x, features])
    for number, size in enumerate((2048, 1024, 512)):
        x = keras.layers.Dense(size, "relu", name=f"user_{number}")(x)
    y = keras.layers.Embedding(items, dim, name="items")(item)
    for number, size in enumerate((1024, 256)):
        y = keras.layers.Dense(size, "relu", name=f"item_{number}")(y)
    x = keras.layers.Concatenate()([x, y])
    x = keras.layers.Dense(256, "relu", name="top")(x)
    x = keras.layers.Dense(2, name="head")(x)
    return keras.Model([user, item, features], x)


def workloads():
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, VOCABULARY, (2, 64, LENGTH))
    samples = 512
    return {
        "decoder": Workload(
            decoder,
            (tokens.astype("int32"), labels),
            {"batch": 2, "model": 2},
            "adam",
        ),
        "recommender": Workload(
            recommender,
            (
                [
                    rng.integers(0, 30_000, samples).astype("int32"),
                    rng.integers(0, 4_000, samples).astype("int32"),
                    rng.normal(size=(samples, 256)).astype("float32"),
                ],
                rng.integers(0, 2, samples),
            ),
            {"batch": 1, "model": 2},
            "adagrad",
        ),
    }


def compare(name, workload, options):
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    mesh = tf.experimental.dtensor.create_mesh(
        list(workload.mesh.items()),
        devices=devices[: int(np.prod(list(workload.mesh.values())))],
    )
    inputs, labels = workload.batch
    plan = tlm.plan(
        workload.build(),
        mesh=mesh,
        memory="8GiB",
        optimizer=workload.optimizer,
        batch_size=len(labels),
    )

    def build(plan):
        with tlm.layout_map_scope(plan.layout_map(mesh)):
            model = workload.build()
            model.compile(
                workload.optimizer,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )

        def run(count):
            for _ in range(count):
                model.train_on_batch(inputs, labels)

        return run

    sizes = " x ".join(map(str, workload.mesh.values()))
    report.compare(
        f"{name} on a {sizes} mesh",
        plan,
        report.random_plans(plan, options.plans),
        build,
        options,
    )


def main():
    options = report.parse_arguments(__doc__)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    for name, workload in workloads().items():
        if options.only in (None, name):
            compare(name, workload, options)


if __name__ == "__main__":
    main()
