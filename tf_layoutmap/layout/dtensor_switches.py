"""DTensor's unsafe passes: are they off?

By default DTensor combines the all-reduces of a step, and a read that follows
a write may then see the value before the write. Training with clipped
gradients goes wrong without an error. And it moves a mesh axis between two
dimensions by an all-to-all, which mixes up tensors of four dimensions and more:
products of attention, say. Environment variables switch both off. `import
tf_layoutmap` sets them, but DTensor reads each once, when it first needs it:
only running a step tells whether that was in time.
"""

import os
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh, mesh_sizes

dtensor = tf.experimental.dtensor

SAFE = {
    "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": "0",
    "DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE": "1",
    "DTENSOR_USE_ALL_TO_ALL_RELAYOUT": "0",
}
_REMEDY = (
    "Import tf_layoutmap before anything runs on DTensor, or start the "
    "process with " + " ".join(f"{k}={v}" for k, v in SAFE.items()) + "."
)

_PAIRS = 4

_checked = False
_lock = threading.Lock()


def self_check(mesh: Mesh | None = None) -> str:
    """Runs what DTensor's unsafe passes get wrong.

    ```python
    print(tlm.layout.self_check())
    ```

    Args:
      mesh: `dtensor.Mesh` to run on; None for one over all local devices of
        the best type.

    Returns:
      A sentence that says what was checked.

    Raises:
      RuntimeError: A read in this process sees the value before a write, or
        a relayout moves elements to wrong places.
    """
    if mesh is None:
        mesh = _mesh_of_all_devices()
    sizes = mesh_sizes(mesh)
    axis = max(sizes, key=sizes.__getitem__)
    if sizes[axis] == 1:
        return "ok: a mesh of one device has nothing to combine or to move"
    stale = _stale_reads(mesh, axis, sizes[axis])
    if stale:
        raise RuntimeError(
            "DTensor must run without its all-reduce combining pass. "
            f"Received: a process in which {stale} of {_PAIRS} reads saw the "
            f"value before the write (mesh {sizes}). {_REMEDY}"
        )
    if _has_moved_wrongly(mesh, axis, sizes[axis]):
        raise RuntimeError(
            "DTensor must run without its all-to-all relayouts. Received: a "
            "process in which a relayout moved elements to wrong places "
            f"(mesh {sizes}). {_REMEDY}"
        )
    return (
        f"ok: {_PAIRS} of {_PAIRS} reads saw the write before them, and a "
        f"relayout moved each element to its place (mesh {sizes})"
    )


def _mesh_of_all_devices() -> Mesh:
    """Returns a mesh over all local devices of the best type."""
    kinds = ("TPU", "GPU", "CPU")
    kind = next(k for k in kinds if tf.config.list_logical_devices(k))
    count = len(tf.config.list_logical_devices(kind))
    return dtensor.create_mesh([("batch", count)], device_type=kind)


def _has_moved_wrongly(mesh: Mesh, axis: str, size: int) -> bool:
    """Whether a mesh axis goes wrong from the second dimension to the third."""
    shape = (1, size, size, 2)
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    whole = dtensor.UNSHARDED
    now, then = (
        dtensor.Layout(specs, mesh)
        for specs in ([whole, axis, whole, whole], [whole, whole, axis, whole])
    )
    moved = dtensor.relayout(transfer.to_mesh(value, now), then)
    parts = dtensor.unpack(moved)
    return not all(
        np.array_equal(parts[device], value[shard.slices])
        for shard in transfer.unique_shards(shape, then)
        for device in shard.devices
    )


def _stale_reads(mesh: Mesh, axis: str, size: int) -> int:
    """Returns how many variables were read before they were written."""
    layout = dtensor.Layout([axis], mesh)

    def zeros() -> Any:
        return dtensor.DVariable(
            transfer.to_mesh(np.zeros([2 * size], np.float32), layout)
        )

    written = [zeros() for _ in range(_PAIRS)]
    copied = [zeros() for _ in range(_PAIRS)]
    gradients = [
        transfer.to_mesh(np.ones([2 * size], np.float32), layout)
        for _ in range(_PAIRS)
    ]

    @tf.function(autograph=False)
    def step(*gradients: Any) -> None:
        # One all-reduce per gradient, all ahead of the writes: combined,
        # they move behind writes that do not need them.
        scaled = [g / (1e-9 + tf.sqrt(tf.reduce_sum(g * g))) for g in gradients]
        for g, first, second in zip(scaled, written, copied):
            first.assign_add(g)
            second.assign_add(first.read_value())

    with tracing.default_mesh(mesh):
        step(*gradients)
    # Local parts alone: with several clients each looks at its own.
    return sum(
        not all(
            np.array_equal(a, b) and np.any(a)
            for a, b in zip(
                dtensor.unpack(first.read_value()),
                dtensor.unpack(second.read_value()),
            )
        )
        for first, second in zip(written, copied)
    )


def check_process(mesh: Mesh) -> None:
    """Raises unless the passes are off; runs `self_check` once per process.

    Raises:
      RuntimeError: A pass is on, by environment or by trial.
    """
    global _checked
    for name, safe in SAFE.items():
        if os.environ.get(name) != safe:
            raise RuntimeError(
                f"Environment variable {name} must be {safe!r}: what it "
                "controls in DTensor gives wrong numbers. Received: "
                f"{os.environ.get(name)!r}. {_REMEDY}"
            )
    with _lock:
        if not _checked and mesh.size > 1:
            self_check(mesh)
            _checked = True
