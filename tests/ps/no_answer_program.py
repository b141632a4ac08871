"""A program whose cluster does not answer; test_faults.py starts it.

    python -m tests.ps.no_answer_program FOLDER [OPTION]

Trains until a step is late, then exits with code 3. With `--before-first-step`
it first waits for a file FOLDER/stopped. With `--before-save` it waits for the
file after its first steps, and then saves. With `--only-connect` it connects
within a second, or fails.
"""

import pathlib
import sys
import time

import tensorflow as tf

import tf_layoutmap as tlm
from tests.ps.train import ROW, embedding


def main():
    folder = pathlib.Path(sys.argv[1])
    if "--only-connect" in sys.argv:
        tlm.ps.connect(timeout_seconds=1)
        return
    strategy = tlm.ps.connect(timeout_seconds=60)
    with strategy.scope():
        ours = embedding()
    # It is freed when this function ends, before the interpreter's shutdown.
    traced = tf.function(lambda value: value + 1)
    traced(tf.constant(1))

    def step(ids):
        ours.enqueue({"a": ids, "b": ids})
        activations = ours.dequeue()
        ours.apply_gradients(
            {name: tf.ones_like(one) for name, one in activations.items()}
        )

    run = tlm.ps.Run(
        strategy,
        step,
        lambda: tf.data.Dataset.from_tensors([ROW]).repeat(),
        folder / "checkpoints",
        objects={"embedding": ours},
        step_deadline="3s",
    )
    print("READY", flush=True)
    while (
        "--before-first-step" in sys.argv and not (folder / "stopped").exists()
    ):
        time.sleep(0.05)
    try:
        while True:
            run.steps(20)
            print("DONE", flush=True)
            while "--before-save" in sys.argv:
                if (folder / "stopped").exists():
                    run.save()
                time.sleep(0.05)
    except tlm.ps.StepDeadlineError as error:
        print("LATE", error, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
