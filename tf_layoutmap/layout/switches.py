"""DTensor's unsafe all-reduce pass: is it off?

By default DTensor combines the all-reduces of a step, and a read that follows
a write may then see the value before the write. Training with clipped
gradients goes wrong without a word. Two environment variables switch the pass
off. `import tf_layoutmap` sets them, but DTensor reads the first of them once,
at its first compile: only running a step tells whether that was in time.
"""

import os
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout import host_values
from tf_layoutmap.layout.layout_map import mesh_sizes

dtensor = tf.experimental.dtensor

SAFE = {"DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": "0",
        "DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE": "1"}
_REMEDY = (
    "Import tf_layoutmap before anything runs on DTensor, or start the "
    "process with " + " ".join(f"{k}={v}" for k, v in SAFE.items()) + ".")

_PAIRS = 4

_checked = False
_lock = threading.Lock()


def self_check(mesh: Any = None) -> str:
    """Runs a step that DTensor's unsafe pass gets wrong.

    ```python
    print(tlm.layout.self_check())
    ```

    Args:
      mesh: `dtensor.Mesh` to run on; None for one over all local devices of
        the best type.

    Returns:
      A sentence that says what was checked.

    Raises:
      RuntimeError: A read in this process sees the value before a write.
    """
    if mesh is None:
        kinds = ("TPU", "GPU", "CPU")
        kind = next(k for k in kinds if tf.config.list_logical_devices(k))
        count = len(tf.config.list_logical_devices(kind))
        mesh = dtensor.create_mesh([("batch", count)], device_type=kind)
    sizes = mesh_sizes(mesh)
    axis = max(sizes, key=sizes.get)
    if sizes[axis] == 1:
        return "ok: a mesh of one device has no all-reduce to combine"
    stale = _stale_reads(mesh, axis, sizes[axis])
    if stale:
        raise RuntimeError(
            "DTensor must run without its all-reduce combining pass. "
            f"Received: a process in which {stale} of {_PAIRS} reads saw the "
            f"value before the write (mesh {sizes}). {_REMEDY}")
    return (f"ok: {_PAIRS} of {_PAIRS} reads saw the write before them "
            f"(mesh {sizes})")


def _stale_reads(mesh: Any, axis: str, size: int) -> int:
    """Returns how many variables were read before they were written."""
    layout = dtensor.Layout([axis], mesh)

    def zeros() -> Any:
        return dtensor.DVariable(
            host_values.to_mesh(np.zeros([2 * size], np.float32), layout))

    written = [zeros() for _ in range(_PAIRS)]
    copied = [zeros() for _ in range(_PAIRS)]
    gradients = [
        host_values.to_mesh(np.ones([2 * size], np.float32), layout)
        for _ in range(_PAIRS)]

    @tf.function(autograph=False)
    def step(*gradients: Any) -> None:
        # One all-reduce per gradient, all ahead of the writes: combined,
        # they move behind writes that do not need them.
        scaled = [g / (1e-9 + tf.sqrt(tf.reduce_sum(g * g)))
                  for g in gradients]
        for g, first, second in zip(scaled, written, copied):
            first.assign_add(g)
            second.assign_add(first.read_value())

    with host_values.default_mesh(mesh):
        step(*gradients)
    # Local parts alone: with several clients each looks at its own.
    return sum(
        not all(np.array_equal(a, b) and np.any(a) for a, b in zip(
            dtensor.unpack(first.read_value()),
            dtensor.unpack(second.read_value())))
        for first, second in zip(written, copied))


def refuse_unsafe_process(mesh: Any) -> None:
    """Raises unless the pass is off; runs `self_check` once per process.

    Raises:
      RuntimeError: The pass is on, by environment or by trial.
    """
    global _checked
    for name, safe in SAFE.items():
        if os.environ.get(name) != safe:
            raise RuntimeError(
                f"Environment variable {name} must be {safe!r}: DTensor's "
                "all-reduce combining pass gives wrong numbers. Received: "
                f"{os.environ.get(name)!r}. {_REMEDY}")
    with _lock:
        if not _checked and mesh.size > 1:
            self_check(mesh)
            _checked = True
