"""What a program leaves alive: graphs, and the memory of variables."""

import collections
import gc

import tensorflow as tf

from tf_layoutmap._core import tf_private


def left_by(program, times=2):
    """Runs a program again, and returns what there is more of afterwards.

    The first time, which may make what is kept on purpose, does not count.
    """
    program()
    before = _alive()
    for _ in range(times):
        program()
    return _alive() - before


def _alive():
    # What is freed can have a finalizer that frees more.
    for _ in range(3):
        gc.collect()
    return collections.Counter(
        type(one).__name__
        for one in gc.get_objects()
        if isinstance(one, (tf_private.FuncGraph, tf.Variable))
        or
        # A handle: the memory of a variable is freed with the last one.
        (
            isinstance(one, tf.Tensor)
            and not tf.is_symbolic_tensor(one)
            and one.dtype == tf.resource
        )
    )
