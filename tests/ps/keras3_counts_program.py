"""Counts steps in variables of Keras 3, in a program with two workers.

python -m tests.ps.keras3_counts_program FOLDER

Prints a line of JSON with the counts after `NUM_STEPS` closures.
"""

import json
import sys

import keras
import tensorflow as tf

import tf_layoutmap as tlm

NUM_STEPS = 200


def main():
    strategy = tlm.ps.connect()
    with strategy.scope():
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
        return loss

    tlm.ps.Run(
        strategy,
        step,
        lambda: tf.data.Dataset.from_tensors([[1], [2]]).repeat(),
        f"{sys.argv[1]}/checkpoints",
        objects={"model": model},
    ).steps(NUM_STEPS)
    print(
        "FOUND",
        json.dumps(
            {
                "steps of the optimizer": int(optimizer.iterations),
                "steps of the table": int(layer.optimizer.iterations),
                "assign_add": float(added.numpy()),
                "assign_sub": -float(subtracted.numpy()),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
