"""Lets a process wait for the other processes of its group before it ends."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import sys

import tensorflow as tf

from tf_layoutmap._core import tf_private

# A process ends after this number of seconds although others are still running.
WAIT_SECONDS = 10.0

_is_registered = False


def wait_for_group() -> None:
    """Lets this process wait for the others, once it has nothing more to do.

    The last collective of a process can return before its data has been sent.
    If the process ended at once, its server would close the connections, and
    the collective would fail in the other processes, for example while process
    0 gathers the rows of a checkpoint. TensorFlow does not wait either.

    A process that ends because of an exception does not wait, because the other
    processes may be waiting for it.
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True
        # In contrast to `atexit`, this also works in processes that the module
        # `multiprocessing` has started.
        multiprocessing.util.Finalize(None, _wait, exitpriority=0)


def _wait() -> None:
    has_failed = (
        sys.exc_info()[0] is not None
        or getattr(sys, "last_type", None) is not None
    )
    if not has_failed and tf_private.has_coordination():
        # The call fails after the timeout, or if another process has ended.
        with contextlib.suppress(tf.errors.OpError):
            tf_private.wait_at_barrier("tf_layoutmap/end", WAIT_SECONDS)
