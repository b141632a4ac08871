"""Counts graphs and variable memory that remain after a program."""

import collections
import gc

import tensorflow as tf

from tf_layoutmap._core import tf_private


def remaining_after(program, times=2):
    """Runs a program repeatedly and counts the objects that remain.

    Objects of the first run are not counted, because it may create permanent
    objects.
    """
    program()
    before = _alive()
    for _ in range(times):
        program()
    return _alive() - before


def _alive():
    # Several passes are needed, because finalizers of freed objects can free
    # more objects.
    for _ in range(3):
        gc.collect()
    return collections.Counter(
        type(one).__name__
        for one in gc.get_objects()
        if isinstance(one, (tf_private.FuncGraph, tf.Variable))
        or
        # Handles are counted too, because a variable's memory is freed when its
        # last handle is deleted.
        (
            isinstance(one, tf.Tensor)
            and not tf.is_symbolic_tensor(one)
            and one.dtype == tf.resource
        )
    )
