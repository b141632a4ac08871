"""One process of a group with pipelined updates of sharded tables.

    python pipelining_program.py FOLDER CASE ORDER

Trains the tables of a CASE, "closed" or "keys". Writes to FOLDER the checkpoint
`start`, the activations and the contents of all tables, and the error of a step
before which only one process has applied the pending update.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

from tests.embedding.divided import checkpoints
from tests.embedding.divided.keys_program import contents, error_of
from tests.embedding.host import multi_process_program, open_tables_program
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

# The calls of a program. "held" reads the variables without the pending update.
SCHEDULES = {
    "closed": [
        *["train", "train", "held", "ahead", "evaluate", "train", "flush"],
        *["held", "train", "read", "train", "train", "held"],
    ],
    "keys": [
        *["train", "train", "held", "write", "held", "train", "evict pending"],
        *["evaluate", "train", "flush", "evict", "train", "resize", "held"],
        *["train", "train", "held"],
    ],
}


def embedding(case, **options):
    """Returns the pipelined embedding of a case."""
    plan = {"closed": multi_process_program, "keys": open_tables_program}[case]
    return plan.embedding(
        **{"pipeline_execution_with_tensor_core": True, **options}
    )


def batch(case, number, replica):
    """Returns features, gradients and weights of one replica by name."""
    if case == "closed":
        names = ("features", "weights", "gradients")
        parts = multi_process_program.batch(number, replica)
        return dict(zip(names, parts, strict=True))
    features, gradients = open_tables_program.batch(number, replica)
    return {"features": features, "gradients": gradients}


def step_functions(one, strategy):
    """Returns functions of steps, which are traced once for all batch sizes."""

    def enqueue(inputs, name, training=True):
        features = inputs["features"]
        weights = {feature: None for feature in features}
        if "weights" in inputs:
            weights["body"] = inputs["weights"]
        one.enqueue(features, weights, training=training, name=name)

    def apply(inputs, name):
        found = one.dequeue(name=name)
        one.apply_gradients(inputs["gradients"], name=name)
        return found

    def train(inputs):
        enqueue(inputs, "one")
        return apply(inputs, "one")

    def ahead(first, second):
        enqueue(first, "one")
        enqueue(second, "two")
        return {
            f"{name}/{feature}": found
            for name, inputs in (("one", first), ("two", second))
            for feature, found in apply(inputs, name).items()
        }

    def evaluate(inputs):
        enqueue(inputs, "one", training=False)
        return one.dequeue(name="one")

    def traced(function):
        return tf.function(
            lambda *args: strategy.run(function, args), reduce_retracing=True
        )

    found = {each.__name__: traced(each) for each in (train, ahead, evaluate)}
    if len(strategy.extended.worker_devices) > 1:
        # Local replicas wait for each other between two steps. Lookups miss one
        # update, whether a step is enqueued before or after this update.
        found["ahead"] = lambda *inputs: {
            f"{name}/{feature}": value
            for name, batch in zip(("one", "two"), inputs, strict=True)
            for feature, value in found["train"](batch).items()
        }
    return found


def evict(one, pending):
    """Evicts keys of the vocabulary "names", or tries to evict all keys."""
    names = one.vocabularies["names"]
    keys = StoredKeys(names.keys()) if pending else StoredKeys(names.keys()[:5])
    if pending:  # The pending update uses the rows of some keys.
        return np.array("in flight" in error_of(lambda: names.evict(keys)))
    return names.evict(keys).numpy()


def train(case, one, strategy, batches):
    """Makes all calls of a case.

    Args:
      case: Key of `SCHEDULES`.
      one: The embedding.
      strategy: Its strategy.
      batches: Function that returns the batch of a number for all local
        replicas.

    Returns:
      A list of activations by name, for each local replica, and a dict of
      contents and evicted keys.
    """
    steps = step_functions(one, strategy)
    activations = [{} for _ in strategy.extended.worker_devices]
    found, number = {}, 0
    for index, action in enumerate(SCHEDULES[case]):
        if action in steps:
            inputs = [batches(number)]
            if action == "ahead":
                inputs.append(batches(number + 1))
            number += len(inputs)
            for name, value in steps[action](*inputs).items():
                values = strategy.experimental_local_results(value)
                for replica, each in enumerate(values):
                    activations[replica][f"{index} {name}"] = each.numpy()
        elif action == "flush":
            one.flush()
        elif action == "write":
            open_tables_program.write(one, number)
        elif action == "resize":
            one.vocabularies["items"].resize(300)
            steps = step_functions(one, strategy)
        elif action.startswith("evict"):
            found[f"{index}"] = evict(one, action == "evict pending")
        else:
            if action == "read":
                assert one.embedding_tables
            for name, value in contents(one).items():
                found[f"{index} {name}"] = value
    return activations, found


def update_in_one(case, one, strategy, worker):
    """Returns the error of a step after only process 0 has called `flush`."""
    step = step_functions(one, strategy)["train"]
    step(batch(case, 20, worker))
    if worker == 0:
        one.flush()
    before = contents(one)
    error = error_of(lambda: step(batch(case, 21, worker)))
    after = contents(one)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    one.flush()
    step(batch(case, 22, worker))
    return error


def main(folder, case, order):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        one = embedding(case, over_processes="sharded", order=order)
    one.build()
    checkpoints.restored(one, folder, worker)("start")
    (activations,), found = train(
        case, one, strategy, lambda number: batch(case, number, worker)
    )
    np.savez(folder / f"activations_{worker}.npz", **activations)
    np.savez(folder / f"found_{worker}.npz", **found)
    (folder / f"{worker}.txt").write_text(
        update_in_one(case, one, strategy, worker)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
