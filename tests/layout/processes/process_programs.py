"""Runs cases in which two processes get different data or act differently.

A test starts this program in both processes:

    python -m tests.layout.processes.process_programs [CASE ...]

The KERAS_DISTRIBUTION_* environment variables select the process. The program
prints one line of JSON: for each case, the result of `fit` or the error.
"""

import json
import os
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras

if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )

import tf_layoutmap as tlm
from tests.layout import pairs
from tf_layoutmap import distribution
from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.processes import messages as process_messages

dtensor = tf.experimental.dtensor

AXES = {"d2.kernel": (None, "model")}
X, Y = pairs.FEATURES, pairs.LABELS
# Deadline in seconds of the process that waits for the delayed process.
DEADLINE_SECONDS = 3
# Deadline in seconds of all other cases. On a busy machine, a step may take
# this long.
PATIENT_SECONDS = 60


def make():
    return pairs.sequential((8,))


def mesh_of(*axes):
    return dtensor.create_distributed_mesh(
        [(axis, 2) for axis in axes], device_type="CPU"
    )


def sharded_by_batch(me):
    """Returns a model on a mesh whose batch axis spans both processes."""
    return pairs.on_mesh(make, AXES, mesh_of("batch", "model"))


def sharded_by_weights(me):
    """Returns the model on a mesh whose model axis spans both processes."""
    return pairs.on_mesh(make, AXES, mesh_of("model", "batch"))


def fit(model, x=X, y=Y, *, optimizer=None, **options):
    return pairs.fit(
        model,
        x,
        y,
        metrics=(),
        optimizer=optimizer or keras.optimizers.SGD(0.1),
        **options,
    )


def fewer_batches(me):
    """Trains with 4 batches per epoch in one process and 3 in the other."""
    size = 24 if me else 32
    return fit(
        sharded_by_batch(me),
        X[:size],
        Y[:size],
        validation_data=(X[:size], Y[:size]),
    )


def fewer_batches_of_a_dataset(me):
    """Trains with fewer batches in one process, and an unknown batch count."""
    size = 32 if me else 24
    data = tf.data.Dataset.from_generator(
        lambda: ((X[i : i + 8], Y[i : i + 8]) for i in range(0, size, 8)),
        output_signature=(
            tf.TensorSpec([None, 8]),
            tf.TensorSpec([None], tf.int64),
        ),
    )
    return fit(sharded_by_batch(me), data, None, batch_size=None)


def smaller_last_batch(me):
    """Trains on last batches of 8 and 5 samples in the two processes."""
    size = 32 if me else 29
    return fit(sharded_by_batch(me), X[:size], Y[:size])


def last_batch_that_does_not_divide(me):
    """Trains on a last batch of 5 samples, which is replicated."""
    return fit(sharded_by_batch(me), X[:29], Y[:29])


def data_that_fails(me):
    def batches():
        # Keras has already read the first batches when training starts.
        for number in range(8):
            if me and number == 6:
                raise ValueError("no such file")
            yield X[:8], Y[:8]

    return fit(sharded_by_batch(me), batches(), None, batch_size=None, epochs=1)


def callback_that_fails(me):
    def fail(batch, logs):
        if me and batch == 1:
            raise ValueError("disk is full")

    return fit(
        sharded_by_batch(me),
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)],
    )


def predict_fewer_batches(me):
    model = sharded_by_batch(me)
    return model.predict(X[: 16 if me else 8], batch_size=8, verbose=0).tolist()


def predict_fewer_samples(me):
    model = sharded_by_batch(me)
    return model.predict(X[: 6 if me else 8], batch_size=8, verbose=0).tolist()


def other_samples_on_one_model_axis(me):
    return fit(sharded_by_weights(me), X + me, Y)


def other_samples_later(me):
    """Trains on different samples in step 3, and checks every step."""
    distribution.set_process_checks(
        every_step=True, deadline_seconds=PATIENT_SECONDS
    )
    try:
        x = X.copy()
        x[16:] += me
        return fit(sharded_by_weights(me), x, Y)
    finally:
        distribution.set_process_checks(deadline_seconds=PATIENT_SECONDS)


def same_samples_on_one_model_axis(me):
    return fit(sharded_by_weights(me))


def model_with_host_tensor(table):
    held = tf.constant(table, tf.float32)
    return pairs.on_mesh(
        lambda: pairs.sequential((8,), keras.layers.Lambda(lambda x: x @ held)),
        AXES,
        mesh_of("batch", "model"),
    )


def same_held_tensor(me):
    return fit(model_with_host_tensor(np.eye(8)))


def other_held_tensor(me):
    return fit(model_with_host_tensor(np.eye(8) + me))


def other_optimizer(me):
    return fit(
        sharded_by_batch(me),
        optimizer=keras.optimizers.SGD(0.01)
        if me
        else keras.optimizers.Adam(0.01),
    )


def other_learning_rate(me):
    return fit(
        sharded_by_batch(me),
        optimizer=keras.optimizers.SGD(0.02 if me else 0.01),
    )


def other_dtype(me):
    return fit(sharded_by_batch(me), X, Y.astype("int32" if me else "int64"))


def other_layout(me):
    return fit(
        pairs.on_mesh(make, AXES if me else {}, mesh_of("batch", "model"))
    )


def other_first_weights(me):
    model = sharded_by_batch(me)
    # The weights differ between the processes, as with different seeds.
    value = np.full([8, 4], me, np.float32)
    model.layers[-1].kernel.assign(value)
    return fit(model, epochs=1)


def weights_set_in_one(me):
    model = sharded_by_batch(me)
    model.compile(keras.optimizers.Adam(0.01), pairs.loss())
    losses = [model.train_on_batch(X[:8], Y[:8])]
    if me:
        model.layers[-1].bias.assign(np.zeros([4], np.float32))
    losses.append(model.train_on_batch(X[:8], Y[:8]))
    return losses


def other_verb(me):
    model = sharded_by_batch(me)
    model.compile(keras.optimizers.Adam(0.01), pairs.loss())
    return (model.test_on_batch if me else model.train_on_batch)(X[:8], Y[:8])


def tf_keras_fewer_batches(me):
    return tf_keras_fit(me, 24 if me else 32, 0.01)


def tf_keras_other_learning_rate(me):
    return tf_keras_fit(me, 32, 0.02 if me else 0.01)


def tf_keras_fit(me, size, learning_rate):
    mesh = mesh_of("batch", "model")
    layout_map = tlm.LayoutMap(mesh)
    layout_map["d1.kernel"] = dtensor.Layout(["unsharded", "model"], mesh)
    with tlm.layout_map_scope(layout_map, init="host"):
        model = tf_keras_model()
    return tf_keras_history(model, size, learning_rate)


def tf_keras_model():
    tf_keras.utils.set_random_seed(3)
    return tf_keras.Sequential(
        [
            tf_keras.Input([8]),
            tf_keras.layers.Dense(16, name="d1"),
            tf_keras.layers.Dense(1, name="d2"),
        ]
    )


def tf_keras_history(model, size, learning_rate=0.01):
    model.compile(tf_keras.optimizers.SGD(learning_rate), "mse")
    return {
        "loss": model.fit(
            X[:size],
            Y[:size].astype(np.float32),
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history["loss"]
    }


def comes_too_late(me):
    """Delays one process until the deadline of the other process has passed."""
    model = sharded_by_batch(me)
    model.compile(keras.optimizers.SGD(0.1), pairs.loss())
    if me:
        tf_private.cluster_value("process 0 gave up", 60)
        return model.train_on_batch(X[:8], Y[:8])
    distribution.set_process_checks(deadline_seconds=DEADLINE_SECONDS)
    try:
        return model.train_on_batch(X[:8], Y[:8])
    finally:
        distribution.set_process_checks(deadline_seconds=PATIENT_SECONDS)
        tf_private.set_cluster_value("process 0 gave up", "")


def bad_id_in_one(me):
    """Trains with an out-of-range id in the samples of process 1.

    This case is the last one, because the processes cannot run collectives
    afterwards.
    """
    model = pairs.on_mesh(
        lambda: pairs.sequential((3,), keras.layers.Embedding(5, 8)),
        {},
        mesh_of("batch", "model"),
    )
    ids = np.ones([32, 3], np.int32)
    ids[13] = 9
    return fit(model, ids)


CASES = [
    fewer_batches,
    fewer_batches_of_a_dataset,
    smaller_last_batch,
    last_batch_that_does_not_divide,
    data_that_fails,
    callback_that_fails,
    predict_fewer_batches,
    predict_fewer_samples,
    other_samples_on_one_model_axis,
    other_samples_later,
    same_samples_on_one_model_axis,
    same_held_tensor,
    other_held_tensor,
    other_optimizer,
    other_learning_rate,
    other_dtype,
    other_layout,
    other_first_weights,
    weights_set_in_one,
    other_verb,
    tf_keras_fewer_batches,
    tf_keras_other_learning_rate,
    comes_too_late,
    bad_id_in_one,
]


def main(names: list[str]) -> None:
    distribution.initialize()
    distribution.set_process_checks(deadline_seconds=PATIENT_SECONDS)
    found = {}
    mesh = mesh_of("batch", "model")
    for number, case in enumerate(CASES):
        if names and case.__name__ not in names:
            continue
        # The message numbers are reset, because a process that failed alone has
        # sent fewer messages than the other process.
        dtensor.barrier(mesh)
        process_messages._number = 1000 * number
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = case(dtensor.client_id())
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        found[case.__name__] = {
            "result": result,
            "warnings": [
                str(one.message)
                for one in caught
                if one.category.__name__ == "UnevenDataWarning"
            ],
        }
        print(case.__name__, found[case.__name__], flush=True)
    print("FOUND " + json.dumps(found), flush=True)
    # After a failure in one process, the cluster cannot shut down normally.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
