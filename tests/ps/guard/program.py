"""Program whose cluster loses a process; the tests of this folder start it.

python -m tests.ps.guard.program FOLDER [OPTIONS AS JSON]

Prints the name of each phase when the phase begins. With the option `calls`,
the program then waits for the file FOLDER/lost, makes calls that are not steps,
and prints the error and the duration of each call.
"""

import json
import os
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.ps import answers

tpu = tf.tpu.experimental.embedding
BATCH = np.arange(4)


def make_embedding(strategy, num_rows=64):
    with strategy.scope():
        one = tlm.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    tpu.TableConfig(
                        size, 4, initializer=tf.zeros_initializer(), name=name
                    )
                )
                for name, size in (("ids", num_rows), ("keys", 64))
            },
            tpu.Adagrad(0.5),
            vocabularies={"keys": tlm.OpenVocabulary(64)},
            partitioner=tlm.partitioners.FixedShardsPartitioner(2),
        )
        one.build(4)
    return one


def make_run(strategy, embedding, folder, options):
    def step(batch):
        embedding.enqueue({"ids": batch, "keys": batch})
        activations = embedding.dequeue()
        embedding.apply_gradients(
            {name: tf.ones_like(one) for name, one in activations.items()}
        )

    return tlm.ps.Run(
        strategy,
        step,
        lambda: tf.data.Dataset.from_tensors(BATCH).repeat(),
        folder / "checkpoints",
        objects={"embedding": embedding},
        step_deadline=options["deadline"],
        on_server_loss=options["on_server_loss"],
    )


def calls(strategy, embedding, run, folder):
    """Returns the calls by name."""
    words = embedding.vocabularies["keys"]
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    base = checkpoint.write(str(folder / "base"))
    writer = tlm.DeltaWriter(embedding, folder / "deltas", base=base)
    table = list(embedding.embedding_tables.values())[0]
    return {
        "stats": embedding.stats,
        "statistics of keys": words.stats,
        "keys": words.keys,
        "lookup": lambda: words.lookup(BATCH),
        "evict": lambda: words.evict(BATCH[:1]),
        "write": lambda: words.write(BATCH[:1], np.ones([1, 4], np.float32)),
        "export of keys": lambda: words.export(folder / "keys"),
        "resize": lambda: words.resize(128),
        "numpy": table.numpy,
        "assign": lambda: table.assign(np.ones([64, 4], np.float32)),
        "DeltaWriter.write": writer.write,
        "read": lambda: checkpoint.read(base),
        "save": run.save,
        "Run": lambda: make_run(
            strategy,
            embedding,
            folder,
            {"deadline": "2s", "on_server_loss": "raise"},
        ),
        "build": lambda: make_embedding(strategy),
    }


def result_of(call):
    began = time.monotonic()
    try:
        call()
        error = "none"
    except Exception as found:
        error = f"{type(found).__name__}: {found}"[:1000]
    return error, time.monotonic() - began


def say(*words):
    print(*words, flush=True)


def main():
    folder = pathlib.Path(sys.argv[1])
    options = {
        "deadline": "60s",
        "on_server_loss": "raise",
        "calls": False,
        "num_builds": 1,
        "num_rows": 64,
        **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"),
    }
    strategy = tlm.ps.connect(
        timeout_seconds=60,
        call_deadline=options["deadline"],
        on_server_loss=options["on_server_loss"],
    )
    say("PHASE build")
    for _ in range(options["num_builds"]):
        embedding = make_embedding(strategy, options["num_rows"])
    say("PHASE restore")
    run = make_run(strategy, embedding, folder, options)
    say("PHASE trace")
    run.steps(until=20)
    say("PHASE end")
    if options["calls"]:
        found = calls(strategy, embedding, run, folder)
        # A busy machine may need more time before the process is lost.
        run._deadline = run._guard._deadline = 2.0
        answers.set_deadline(2.0)
        say("PHASE calls")
        while not (folder / "lost").exists():
            time.sleep(0.02)
        say(
            "FOUND "
            + json.dumps({name: result_of(one) for name, one in found.items()})
        )
    say("ENDED", run.num_done)
    os._exit(0)


if __name__ == "__main__":
    main()
