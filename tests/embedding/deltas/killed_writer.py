"""Writes deltas until it is killed, and again: a program of its own.

    python killed_writer.py BASE DIRECTORY

Importing TensorFlow takes seconds, so it is done once: each line on standard
input starts a copy of the process, whose number is printed, then "ready" when
it begins to write, "written" after each delta, and "dead" once somebody has
killed it.
"""

import os
import sys

import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.deltas import cases


def write_deltas(base, directory):
    """Goes on where the deltas end; each is a step."""
    one = cases.embedding()
    full = tlm.apply_deltas(base, directory, f"{directory}-{os.getpid()}/full")
    tf.train.Checkpoint(embedding=one).restore(full)
    writer = tlm.DeltaWriter(one, directory, base=base)
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
