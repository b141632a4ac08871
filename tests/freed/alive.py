"""Counts graphs and variable memory that remain after a program."""

import collections
import gc

import tensorflow as tf

from tf_layoutmap._core import tf_private


def remaining_after(program, times=2):
    """Runs a program again, and returns the additional objects that remain.

    The first run is not counted, because it may create permanent objects.
    """
    program()
    before = _alive()
    for _ in range(times):
        program()
    return _alive() - before


def _alive():
    # Freed objects can have finalizers that free more objects.
    for _ in range(3):
        gc.collect()
    return collections.Counter(
        type(one).__name__
        for one in gc.get_objects()
        if isinstance(one, (tf_private.FuncGraph, tf.Variable))
        or
        # Counts handles, because the last handle frees the memory of a
        # variable.
        (
            isinstance(one, tf.Tensor)
            and not tf.is_symbolic_tensor(one)
            and one.dtype == tf.resource
        )
    )
