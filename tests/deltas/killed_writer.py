"""Program that repeatedly writes deltas until it is killed.

    python killed_writer.py BASE DIRECTORY

Importing TensorFlow takes seconds, so the program imports it once and forks:
each line on standard input starts a copy of the process. The program prints
the copy's process id, "ready" when the copy begins to write, "written" after
each delta, and "dead" after the copy was killed.
"""

import os
import sys

import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas import cases


def write_deltas(base, directory):
    """Continues after the last delta, and writes a delta after each step."""
    one = cases.embedding()
    full = tlm.deltas.apply(base, directory, f"{directory}-{os.getpid()}/full")
    tf.train.Checkpoint(embedding=one).restore(full)
    writer = tlm.deltas.DeltaWriter(one, directory, base=base)
    assert one.vocabularies["words"].stats()["step"] == len(writer.deltas)
    print("ready", flush=True)
    for step in range(len(writer.deltas), 100_000):
        cases.train(one, step)
        writer.write()
        print("written", flush=True)


def main(base, directory):
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            try:
                write_deltas(base, directory)
            finally:
                os._exit(1)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
