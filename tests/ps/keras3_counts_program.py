"""Counts steps in variables of Keras 3, in a program with two workers.

python -m tests.ps.keras3_counts_program FOLDER

Prints a line of JSON with the counts after `NUM_STEPS` closures. Then prints a
line with the error of a metric whose updates would be lost.
"""

import json
import sys

import keras
import tensorflow as tf

import tf_layoutmap as tlm

NUM_STEPS = 200
LABELS = [[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]]
PREDICTIONS = [[0.25, 0.75, 0.25, 0.5], [1.0, 0.25, 0.75, 0.5]]


class Added(keras.metrics.Metric):
    """Metric with sums in other forms than in Keras' metrics."""

    def __init__(self):
        super().__init__()
        self.total = self.add_variable((2,), "zeros", name="total")

    def update_state(self, y_true, y_pred):
        del y_true
        # The first dimension of the sum is broadcast.
        self.total.assign(1.0 + (self.total - y_pred[0, 0]) + 0.5)


class Largest(keras.metrics.Metric):
    """Metric whose updates by several workers would be lost."""

    def __init__(self):
        super().__init__()
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred):
        del y_true
        self.largest.assign(
            keras.ops.maximum(self.largest, keras.ops.max(y_pred))
        )


def metrics():
    """Returns metrics whose variables hold integers or multiples of 1/4."""
    return [
        keras.metrics.Sum(),
        keras.metrics.MeanAbsoluteError(),
        keras.metrics.Precision(),
        keras.metrics.FalseNegatives(thresholds=[0.3, 0.8]),
        keras.metrics.AUC(num_thresholds=5, multi_label=True),
        keras.metrics.F1Score(threshold=0.5),
        keras.metrics.MeanIoU(2),
        keras.metrics.R2Score(),
        Added(),
    ]


def update(found):
    """Updates metrics with one batch."""
    for one in found:
        if isinstance(one, keras.metrics.Sum):
            one.update_state(tf.constant(PREDICTIONS))
        else:
            one.update_state(tf.constant(LABELS), tf.constant(PREDICTIONS))


def variables_of(found):
    return {
        f"{type(one).__name__} {variable.name}": variable
        for one in found
        for variable in one.variables
    }


def main():
    strategy = tlm.ps.connect()
    alone = metrics()
    update(alone)
    with strategy.scope():
        shared, largest = metrics(), Largest()
        update(shared)  # Some metrics create their variables here.
        for one in shared:
            one.reset_state()
        layer = tlm.layers.ShardedEmbedding(10, 4, optimizer="sgd")
        model = keras.Sequential(
            [keras.Input([1], dtype="int64"), layer, keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        added, subtracted = (
            keras.Variable(0.0, trainable=False) for _ in range(2)
        )

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(ids, training=True) ** 2)
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
            )
        )
        added.assign_add(1)
        subtracted.assign_sub(1.0)
        update(shared)
        return loss

    def run(step_fn, name):
        tlm.ps.Run(
            strategy,
            step_fn,
            lambda: tf.data.Dataset.from_tensors([[1], [2]]).repeat(),
            f"{sys.argv[1]}/{name}",
            objects={"model": model},
        ).steps(NUM_STEPS)

    run(step, "checkpoints")
    expected = variables_of(alone)
    print(
        "FOUND",
        json.dumps(
            {
                "steps of the optimizer": int(optimizer.iterations),
                "steps of the table": int(layer.optimizer.iterations),
                "assign_add": float(added.numpy()),
                "assign_sub": -float(subtracted.numpy()),
                "metrics": {
                    name: [
                        one.numpy().tolist(),
                        (NUM_STEPS * expected[name].numpy()).tolist(),
                    ]
                    for name, one in variables_of(shared).items()
                },
            }
        ),
        flush=True,
    )
    try:
        run(lambda ids: update([largest]), "others")
    except ValueError as error:
        print("REFUSED", json.dumps(str(error)), flush=True)


if __name__ == "__main__":
    main()
