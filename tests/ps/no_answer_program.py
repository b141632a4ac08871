"""Program whose cluster does not respond; test_faults.py starts it.

python -m tests.ps.no_answer_program FOLDER [OPTION]

Trains until a step misses its deadline, then exits with code 3. With
`--before-first-step`, the program first waits for the file FOLDER/stopped. With
`--before-save`, the program waits for the file after its first steps, and then
saves. With `--only-connect`, the program only connects, with a timeout of one
second.
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
        embeddings = embedding()
    # This function is freed when `main` returns, before the interpreter shuts
    # down.
    traced = tf.function(lambda value: value + 1)
    traced(tf.constant(1))

    def step(ids):
        embeddings.enqueue({"a": ids, "b": ids})
        activations = embeddings.dequeue()
        embeddings.apply_gradients(
            {name: tf.ones_like(one) for name, one in activations.items()}
        )

    run = tlm.ps.Run(
        strategy,
        step,
        lambda: tf.data.Dataset.from_tensors([ROW]).repeat(),
        folder / "checkpoints",
        objects={"embedding": embeddings},
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
