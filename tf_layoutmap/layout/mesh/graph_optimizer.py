"""Functions for a mesh are compiled without Grappler, TensorFlow's optimizer.

DTensor makes a function for each device, and Grappler optimizes each of them
again. That takes about a third of the first step; later steps are as fast
without it (`docs/benchmarks.md`). Some of those functions have products whose
shapes its estimates of costs cannot follow: for each step that is traced it
writes "Incompatible Matrix dimensions" to stderr.
"""

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap._core import tf_private

_thread = threading.local()


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Lets functions that are called in it be compiled without Grappler.

    What a user chose with `tf.config.optimizer.set_experimental_options` is
    kept as it is: `auto_mixed_precision`, for one, is a part of Grappler.
    """
    before = tf_private.function_call_options()
    if before is getattr(_thread, "without", None):
        yield
        return
    # One object of TensorFlow's stands for one configuration.
    if before is not getattr(_thread, "before", None):
        _thread.before = before
        _thread.without = (
            before
            if _is_configured()
            else tf_private.options_without_graph_optimizer(before)
        )
    tf_private.set_function_call_options(_thread.without)
    try:
        yield
    finally:
        # TensorFlow forgets the options when its configuration changes.
        if tf_private.function_call_options() is _thread.without:
            tf_private.set_function_call_options(before)


def _is_configured() -> bool:
    return any(tf.config.optimizer.get_experimental_options().values())
