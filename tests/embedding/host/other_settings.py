"""One of two processes that create embeddings with different settings.

    python other_settings.py OUTPUT

test_agreed_settings.py starts the program, which writes the result of each case
to OUTPUT, as JSON.
"""

import json
import os
import pathlib
import sys

import keras
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes

tpu = tf.tpu.experimental.embedding


def make(
    optimizer=None,
    *,
    rows=5,
    combiner="sum",
    length=0,
    names=("words",),
    vocabulary=None,
    initializer=None,
    **arguments,
):
    tables = [
        tpu.TableConfig(
            rows,
            2,
            initializer or tf.ones_initializer(),
            name=name,
            combiner=combiner,
        )
        for name in names
    ]
    tlm.TPUEmbedding(
        {
            table.name: tpu.FeatureConfig(table, max_sequence_length=length)
            for table in tables
        },
        optimizer or tpu.SGD(0.5),
        vocabularies={"words": vocabulary} if vocabulary else None,
        **arguments,
    )


def cases(worker):
    """Returns a function that creates an embedding for each case, by name."""
    return {
        "rate": lambda: make(tpu.SGD(0.5 + worker)),
        "clip": lambda: make(tpu.SGD(0.5, clipvalue=1.0 + worker)),
        "decay": lambda: make(tpu.SGD(0.5, weight_decay_factor=0.1 * worker)),
        "accumulator": lambda: make(
            tpu.Adagrad(0.5, initial_accumulator_value=0.1 + worker)
        ),
        "rule": lambda: make(tpu.Adagrad(0.5) if worker else tpu.SGD(0.5)),
        "combiner": lambda: make(combiner="mean" if worker else "sum"),
        "rows": lambda: make(rows=5 + worker),
        "tables": lambda: make(names=["words", "tags"][: 1 + worker]),
        "length": lambda: make(length=2 + worker),
        "out_of_range": lambda: make(
            out_of_range="drop" if worker else "error"
        ),
        "gradient_aggregation": lambda: make(
            over_processes="sharded",
            gradient_aggregation="local" if worker else "exact",
        ),
        "over_processes": lambda: make(
            over_processes="sharded" if worker else "replicated"
        ),
        "seed": lambda: make(rounding_seed=worker),
        "vocabulary": lambda: make(
            rows=100,
            vocabulary=tlm.vocabulary.OpenVocabulary(100, ttl_steps=1 + worker),
        ),
        "open": lambda: make(
            rows=100,
            vocabulary=tlm.vocabulary.OpenVocabulary(100) if worker else None,
        ),
        "initializer": lambda: make(
            over_processes="sharded",
            initializer=tf.constant_initializer(worker),
        ),
        "first rows of the first process": lambda: make(
            initializer=tf.constant_initializer(worker)
        ),
        "a seed of each process": lambda: make(
            over_processes="sharded",
            initializer=keras.initializers.RandomNormal(),
        ),
        "functions of each process": lambda: make(
            tpu.SGD(lambda: 0.5),
            rows=100,
            vocabulary=tlm.vocabulary.OpenVocabulary(
                100, on_evict=print if worker else None
            ),
        ),
    }


def main(output):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    found = {}
    for name, function in cases(worker).items():
        try:
            with strategy.scope():
                function()
            found[name] = "made"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    path = pathlib.Path(output)
    path.write_text(json.dumps(found))
    processes.stay_until_written(path.parent, "[01].txt")


if __name__ == "__main__":
    main(*sys.argv[1:])
