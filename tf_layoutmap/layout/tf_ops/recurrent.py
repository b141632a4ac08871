"""Recurrent layers of Keras 3 and tf_keras on a mesh, unrolled.

Both hand their loop to one function of their backend, which can unroll it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import trace_context
from tf_layoutmap.layout.tf_ops import loops


def rnn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`backend.rnn`; for a mesh unrolled if it knows its number of steps.

    Where it does not, or where samples have lengths of their own, the loop
    goes through `loops.py` as any other.
    """
    if not trace_context.traced_for_mesh():
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    options = call.arguments
    steps = tf.nest.flatten(options["inputs"])[0].shape[
        0 if options.get("time_major") else 1
    ]
    lengths = options.get("input_length")
    if (
        steps
        and steps <= loops.MOST_STEPS
        and (lengths is None or isinstance(lengths, int))
    ):
        options["unroll"] = True
    return original(*call.args, **call.kwargs)
