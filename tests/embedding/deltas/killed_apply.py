"""Applies deltas until it kills itself, and again: a program of its own.

    python killed_apply.py BASE DIRECTORY TARGET

Each line on standard input, a number, starts a copy of the process, which
kills itself right before its so manieth operation on files; then "killed" is
printed, or "done" if there were not so many.
"""

import os
import signal
import sys

import tensorflow as tf

import tf_layoutmap as tlm

OPERATIONS = ("fsync", "mkdir", "remove", "replace", "rmdir", "unlink")


def kill_before(count):
    """Counts operations, of Python and of TensorFlow."""
    left = count

    def counting(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counting(getattr(os, name)))
    for name in ("SaveV2", "MergeV2Checkpoints"):
        setattr(tf.raw_ops, name, counting(getattr(tf.raw_ops, name)))


def main(base, directory, target):
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                kill_before(int(line))
                tlm.apply_deltas(base, directory, target)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(
            {0: "done", -signal.SIGKILL: "killed"}.get(code, code), flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
