"""Checks that two unsafe passes of DTensor are disabled.

By default DTensor combines the all-reduces of a step. With combined
all-reduces, a read that follows a write may return the value from before the
write. Training with clipped gradients then computes wrong results without an
error. By default DTensor also uses an all-to-all operation to move a mesh axis
from one dimension to another. This operation permutes the elements of tensors
with four or more dimensions, which are used in attention, for example.
Environment variables disable both passes. `import tf_layoutmap` sets these
variables, but DTensor reads each variable only once, at its first use. If
DTensor was used before the import, the variables have no effect, so this module
runs small programs to find out whether the passes are disabled.
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
    """Runs operations that fail if DTensor's unsafe passes are enabled.

    ```python
    print(tlm.layout.self_check())
    ```

    Args:
      mesh: `dtensor.Mesh` to run on. None creates a mesh of all local TPUs. If
        there are no TPUs, the mesh consists of all local GPUs or CPUs.

    Returns:
      A sentence that describes what was checked.

    Raises:
      RuntimeError: If a read in this process does not return the value that was
        written before, or a relayout moves elements to wrong positions.
    """
    if mesh is None:
        mesh = _mesh_of_all_devices()
    sizes = mesh_sizes(mesh)
    axis = max(sizes, key=sizes.__getitem__)
    if sizes[axis] == 1:
        return "ok: a mesh of one device runs no all-reduce and no relayout"
    stale = _stale_reads(mesh, axis, sizes[axis])
    if stale:
        raise RuntimeError(
            "DTensor must run without its all-reduce combining pass. "
            f"Received: a process in which {stale} of {_PAIRS} reads returned "
            f"the value before the write (mesh {sizes}). {_REMEDY}"
        )
    if _relayout_is_wrong(mesh, axis, sizes[axis]):
        raise RuntimeError(
            "DTensor must run without its all-to-all relayouts. Received: a "
            "process in which a relayout moved elements to wrong positions "
            f"(mesh {sizes}). {_REMEDY}"
        )
    return (
        f"ok: {_PAIRS} of {_PAIRS} reads returned the value written before "
        "them, and a relayout moved each element to its position "
        f"(mesh {sizes})"
    )


def _mesh_of_all_devices() -> Mesh:
    """Returns a mesh of all local TPUs, GPUs or CPUs, in this order."""
    kinds = ("TPU", "GPU", "CPU")
    kind = next(k for k in kinds if tf.config.list_logical_devices(k))
    count = len(tf.config.list_logical_devices(kind))
    return dtensor.create_mesh([("batch", count)], device_type=kind)


def _relayout_is_wrong(mesh: Mesh, axis: str, size: int) -> bool:
    """Returns whether moving `axis` from dimension 1 to 2 permutes elements."""
    shape = (1, size, size, 2)
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    none = dtensor.UNSHARDED
    before, after = (
        dtensor.Layout(specs, mesh)
        for specs in ([none, axis, none, none], [none, none, axis, none])
    )
    moved = dtensor.relayout(transfer.to_mesh(value, before), after)
    parts = dtensor.unpack(moved)
    return not all(
        np.array_equal(parts[device], value[shard.slices])
        for shard in transfer.unique_shards(shape, after)
        for device in shard.devices
    )


def _stale_reads(mesh: Mesh, axis: str, size: int) -> int:
    """Returns the number of reads that did not return the written value."""
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
        # If each gradient has a separate all-reduce, the all-reduces run before
        # the writes. If DTensor combines the all-reduces, the combined
        # all-reduce runs after some of the writes.
        scaled = [g / (1e-9 + tf.sqrt(tf.reduce_sum(g * g))) for g in gradients]
        for g, first, second in zip(scaled, written, copied):
            first.assign_add(g)
            second.assign_add(first.read_value())

    with tracing.default_mesh(mesh):
        step(*gradients)
    # If there are several clients, each client compares only its local shards.
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
    """Checks that both passes are off; runs `self_check` once per process.

    Raises:
      RuntimeError: If the environment enables a pass, or `self_check` fails.
    """
    global _checked
    for name, safe in SAFE.items():
        if os.environ.get(name) != safe:
            raise RuntimeError(
                f"Environment variable {name} must be {safe!r}, because the "
                "DTensor pass that it controls computes wrong results. "
                f"Received: {os.environ.get(name)!r}. {_REMEDY}"
            )
    with _lock:
        if not _checked and mesh.size > 1:
            self_check(mesh)
            _checked = True
