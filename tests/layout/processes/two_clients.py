"""One of two processes that train one model.

A test starts this program in both processes:

    python -m tests.layout.processes.two_clients FOLDER

The KERAS_DISTRIBUTION_* environment variables select the process. The program
prints one line of JSON.
"""

import json
import sys
from pathlib import Path

import keras
import tensorflow as tf

if __name__ == "__main__":
    # Each process has two devices. Without this call, the modules that are
    # imported below would create four devices.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )

from tests import initial_values
from tests.layout import pairs
from tests.layout.meshes import axes_of
from tf_layoutmap.distribution import initialize
from tf_layoutmap.layout import to_host, to_mesh

dtensor = tf.experimental.dtensor

# The mesh axis "batch" spans both processes.
AXES = {
    "d1.kernel": ("batch", "model"),
    "bn.gamma": ("model",),
    "d2.kernel": ("model", None),
}
SIZES = [("batch", 2), ("model", 2)]


def make():
    return pairs.sequential(
        (8,),
        keras.layers.Dense(16, activation="tanh", use_bias=False, name="d1"),
        keras.layers.BatchNormalization(name="bn"),
    )


def train(model, put=tf.constant):
    """Runs `fit`, single batches and a custom loop.

    Args:
      model: New model.
      put: Function that copies a batch to the devices of the model.

    Returns:
      Results that must not depend on the number of processes.
    """
    x, y = pairs.FEATURES, pairs.LABELS
    history = pairs.fit(
        model,
        optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        epochs=3,
        validation_data=(x[:12], y[:12]),
    )
    uneven = [float(v) for v in model.train_on_batch(x[:5], y[:5])]
    loop = custom_loop(model, put(x), put(y))
    return {
        "history": history,
        "uneven": uneven,
        "loop": loop,
        "predicted": model.predict(x[:3], verbose=0).tolist(),
    }


def custom_loop(model, x, y):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True
                )
            )
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    losses = [step(x, y) for _ in range(3)]
    return [float(to_host(v) if dtensor.is_dtensor(v) else v) for v in losses]


def checkpoint_of(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def main(folder: Path) -> None:
    initialize()
    mesh = dtensor.create_distributed_mesh(SIZES, device_type="CPU")
    assert mesh.num_local_devices() == 2 and mesh.size == 4
    model = pairs.on_mesh(make, AXES, mesh)
    found = train(
        model,
        lambda v: to_mesh(
            v, dtensor.Layout.batch_sharded(mesh, "batch", v.ndim)
        ),
    )
    # Each process compares its own shards.
    ab_mesh = dtensor.create_distributed_mesh(
        [("a", 2), ("b", 2)], device_type="CPU"
    )
    found["initial_values"] = {
        case.name: wrong
        for case in initial_values.cases()
        if (wrong := initial_values.on_meshes(case, {"2x2": ab_mesh}))
    }
    found["axes"] = [axes_of(w) for w in model.weights]
    # Saving gathers the weights, so all processes must save at the same time.
    # Each process writes a separate file.
    model.save(folder / f"client_{dtensor.client_id()}.keras")
    checkpoint_of(model).write(str(folder / "checkpoint"))
    dtensor.barrier(mesh)
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
