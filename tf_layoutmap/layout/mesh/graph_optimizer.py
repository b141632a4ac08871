"""Disables Grappler, TensorFlow's graph optimizer, for functions on a mesh.

DTensor creates a function for each device, and Grappler optimizes each of them
separately. This takes about a third of the first step, and later steps are not
faster with Grappler (`docs/benchmarks.md`). In addition, Grappler's cost model
cannot infer the shapes of some matrix products and writes "Incompatible Matrix
dimensions" to stderr for each trace of a step.
"""

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap._core import tf_private

_thread = threading.local()


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Compiles functions that are called inside the context without Grappler.

    Nothing changes if user code has called
    `tf.config.optimizer.set_experimental_options`, because options such as
    `auto_mixed_precision` are implemented by Grappler.
    """
    before = tf_private.function_call_options()
    if before is getattr(_thread, "without", None):
        yield
        return
    # TensorFlow creates one options object per configuration, so the object
    # identifies the configuration.
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
        # TensorFlow drops the options when its configuration changes.
        if tf_private.function_call_options() is _thread.without:
            tf_private.set_function_call_options(before)


def _is_configured() -> bool:
    return any(tf.config.optimizer.get_experimental_options().values())
