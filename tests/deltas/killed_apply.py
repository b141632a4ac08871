"""Program that repeatedly applies deltas until it kills itself.

    python killed_apply.py BASE DIRECTORY TARGET

Each line on standard input is a number N and starts a copy of the process. The
copy kills itself right before its N-th file operation. The program then prints
"killed", or "done" if the copy made fewer than N operations.
"""

import os
import signal
import sys

import tensorflow as tf

import tf_layoutmap as tlm

OPERATIONS = ("fsync", "mkdir", "remove", "replace", "rmdir", "unlink")


def kill_before(count):
    """Kills the process before the file operation number `count`.

    File operations of Python and of TensorFlow are counted.
    """
    num_remaining = count

    def counting(function):
        def call(*args, **kwargs):
            nonlocal num_remaining
            num_remaining -= 1
            if not num_remaining:
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
                tlm.deltas.apply(base, directory, target)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(
            {0: "done", -signal.SIGKILL: "killed"}.get(code, code), flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
