"""Program whose cluster loses a process; the tests of this folder start it.

python -m tests.ps.guard.program FOLDER [OPTIONS AS JSON]

Prints the name of each phase when the phase begins. With the option `calls`,
the program then makes calls that are not steps, and prints the error and the
duration of each call. With "all", it waits for the file FOLDER/lost, and makes
each call once. With a list of names, it repeats these calls until one of them
fails, and then makes each of the others once.
"""

import itertools
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
# Deadline of the calls in seconds. On a busy machine, a process that is not
# stopped may need some seconds for an answer.
CALL_SECONDS = 4.0


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
            vocabularies={"keys": tlm.vocabulary.OpenVocabulary(64)},
            partitioner=tlm.partitioners.FixedShardsPartitioner(2),
        )
        one.build(4)
    return one


def make_run(strategy, embedding, folder, deadline, on_server_loss="raise"):
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
        step_deadline=deadline,
        on_server_loss=on_server_loss,
    )


def calls(strategy, embedding, run, folder):
    """Returns the calls by name."""
    words = embedding.vocabularies["keys"]
    # A `DeltaWriter` does not support an embedding that was resized.
    resized = make_embedding(strategy).vocabularies["keys"]
    capacities = itertools.cycle([128, 64])
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    base = checkpoint.write(str(folder / "base"))
    writer = tlm.deltas.DeltaWriter(embedding, folder / "deltas", base=base)
    table = list(embedding.embedding_tables.values())[0]
    return {
        "stats": embedding.stats,
        "statistics of keys": words.stats,
        "keys": words.keys,
        "lookup": lambda: words.lookup(BATCH),
        "evict": lambda: words.evict(BATCH[:1]),
        "write": lambda: words.write(BATCH[:1], np.ones([1, 4], np.float32)),
        "export of keys": lambda: words.export(folder / "keys"),
        "resize": lambda: resized.resize(next(capacities)),
        "numpy": table.numpy,
        "assign": lambda: table.assign(np.ones([64, 4], np.float32)),
        "DeltaWriter.write": writer.write,
        "export": lambda: tlm.export(embedding, folder / "export"),
        "read": lambda: checkpoint.read(base),
        "save": run.save,
        "Run": lambda: make_run(strategy, embedding, folder, CALL_SECONDS),
        "build": lambda: make_embedding(strategy),
    }


def result_of(call):
    """Returns the error of a call as text, and the duration in seconds."""
    began = time.monotonic()
    try:
        call()
        error = "none"
    except Exception as found:
        error = f"{type(found).__name__}: {found}"[:1000]
    return error, time.monotonic() - began


def results_of(all_calls, folder, names):
    """Returns the results of calls while the cluster loses a process."""
    if names == "all":
        while not (folder / "lost").exists():
            time.sleep(0.02)
        return {name: result_of(one) for name, one in all_calls.items()}
    for name in itertools.cycle(names):
        found = {name: result_of(all_calls[name])}
        if found[name][0] != "none":
            break
    for other in names:
        if other not in found:
            found[other] = result_of(all_calls[other])
    return found


def say(*words):
    print(*words, flush=True)


def main():
    folder = pathlib.Path(sys.argv[1])
    options = {
        "deadline": "60s",
        "on_server_loss": "raise",
        "calls": None,
        "num_builds": 1,
        "num_rows": 64,
        "until": 20,
        **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"),
    }
    deadline, on_server_loss = options["deadline"], options["on_server_loss"]
    strategy = tlm.ps.connect(
        timeout_seconds=60,
        call_deadline=deadline,
        on_server_loss=on_server_loss,
    )
    say("PHASE build")
    for _ in range(options["num_builds"]):
        embedding = make_embedding(strategy, options["num_rows"])
    say("PHASE restore")
    run = make_run(strategy, embedding, folder, deadline, on_server_loss)
    say("PHASE trace")
    run.steps(until=options["until"])
    say("PHASE end")
    if options["calls"]:
        found = calls(strategy, embedding, run, folder)
        # Each call must raise its error. A busy machine may need more time for
        # the calls above.
        run._guard._restarts_program = False
        run._deadline = run._guard._deadline = CALL_SECONDS
        answers.set_deadline(CALL_SECONDS)
        say("PHASE calls")
        found = results_of(found, folder, options["calls"])
        say("FOUND " + json.dumps(found))
    say("ENDED", run.num_done)
    os._exit(0)


if __name__ == "__main__":
    main()
