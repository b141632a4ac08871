"""Compares a step on a mesh and a step of a table with Keras alone.

`python -m tf_layoutmap check` runs this check. With a version of Keras that was
not tested, the import of the package runs the command.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

# Sums over shards are computed in a different order than without shards.
_TOLERANCE = 1e-5
_FEATURES = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
_IDS = np.array([[0, 3], [3, 9], [5, 5], [9, 1]])
_LABELS = np.array([0, 1, 1, 0])


def compare_with_stock() -> str:
    """Trains small models with and without this package.

    Returns:
      A description of the checks that were run.

    Raises:
      RuntimeError: If weights differ or a slot variable is not sharded.
    """
    mesh = tf.experimental.dtensor.create_mesh(
        [("batch", 1), ("model", 2)],
        devices=[
            device.name for device in tf.config.list_logical_devices("CPU")[:2]
        ],
    )
    layout_map = tlm.LayoutMap(mesh=mesh)
    layout_map["d.kernel"] = tf.experimental.dtensor.Layout(
        ["unsharded", "model"], mesh
    )
    adam, sgd = keras.optimizers.Adam, keras.optimizers.SGD
    stock = _trained(_dense_model, _FEATURES, adam, run_eagerly=True)
    with tlm.layout_map_scope(layout_map):
        sharded = _trained(_dense_model, _FEATURES, adam)
    _check_equal("A step on a mesh", stock, sharded)
    shape = sharded.get_layer("d").kernel.shape
    slots = [
        variable
        for variable in sharded.optimizer.variables
        if variable.shape == shape
    ]
    if not slots or any(
        slot.value.layout.is_fully_replicated() for slot in slots
    ):
        raise RuntimeError(
            "The slot variables of a sharded weight must be sharded. Received: "
            f"{len(slots)} slot variables, which are replicated."
        )
    _check_equal(
        "A step of a table",
        # With Adam, Keras also updates rows that a step does not look up.
        _trained(
            lambda: _table_model(keras.layers.Embedding),
            _IDS,
            sgd,
            run_eagerly=True,
        ),
        _trained(lambda: _table_model(_sharded_embedding), _IDS, sgd),
    )
    return (
        "ok: a step on a mesh and a step of a sharded table computed the same "
        "weights as Keras alone"
    )


def _dense_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(6, activation="tanh", name="d"),
            keras.layers.Dense(2),
        ]
    )


def _table_model(make: Callable[..., Any]) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            make(10, 4, embeddings_initializer="glorot_uniform"),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def _sharded_embedding(*args: Any, **kwargs: Any) -> keras.layers.Layer:
    return tlm.layers.ShardedEmbedding(*args, num_shards=3, **kwargs)


def _trained(
    make: Callable[[], keras.Model],
    inputs: Any,
    optimizer: Callable[..., Any],
    *,
    run_eagerly: bool = False,
) -> keras.Model:
    # Eager steps save the time to trace and compile a step.
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(
        optimizer(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=run_eagerly,
    )
    model.fit(
        inputs,
        _LABELS,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,  # pyright: ignore[reportArgumentType]
    )
    return model


def _check_equal(what: str, stock: keras.Model, ours: keras.Model) -> None:
    expected = stock.get_weights()
    values = ours.get_weights()
    # A table with several shards has one weight per shard.
    for index, value in enumerate(expected):
        count = len(values) - len(expected) + 1 if index == 0 else 1
        shards, values = values[:count], values[count:]
        difference = np.max(np.abs(np.concatenate(shards) - value))
        # A NaN is a difference.
        if not difference <= _TOLERANCE:
            raise RuntimeError(
                f"{what} must compute the same weights as Keras alone. "
                f"Received: weight {index} differs by {difference}."
            )
