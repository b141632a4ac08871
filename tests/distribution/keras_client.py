"""One of two processes that train a model with keras.distribution.

A test starts this program in both processes:

    python -m tests.distribution.keras_client

The KERAS_DISTRIBUTION_* environment variables select the process. The program
prints one line of JSON.
"""

import json

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

X = np.random.default_rng(0).normal(size=[24, 8]).astype(np.float32)
Y = X[:, :2] + 1


def make():
    return keras.Sequential(
        [
            keras.Input([8]),
            keras.layers.Dense(16, activation="tanh", name="d1"),
            keras.layers.Dense(2, name="d2"),
        ]
    )


def train(model):
    """Returns numbers that must not depend on the number of processes."""
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    return {
        "history": model.fit(data, epochs=2, verbose=0).history,
        "evaluated": model.evaluate(data, verbose=0),
        "predicted": model.predict(data, verbose=0).tolist(),
    }


def main() -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    tlm.distribution.enable()
    keras.distribution.initialize()
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*d1/kernel"] = (None, "model")
    layout_map[".*d2/kernel"] = ("model", None)
    parallel = keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )
    keras.distribution.set_distribution(parallel)
    # All processes have the same random seed.
    weights = [w.tolist() for w in make().get_weights()]
    keras.utils.set_random_seed(3)
    model = make()
    found = train(model)
    found["weights"] = weights
    found["devices"] = keras.distribution.list_devices()
    found["process"] = [parallel.num_processes, parallel.data_shard_id]
    found["specs"] = model.layers[0].kernel.layout.sharding_specs
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
