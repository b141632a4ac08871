"""Measures products, copies and collectives on all devices of a mesh.

All devices work at the same time. If they share processors or memory, as
logical CPUs do, the measured speeds are therefore the speeds during a step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import device_mesh

dtensor: Any = tf.experimental.dtensor

# Operations per call. The time of an operation is computed from calls with
# `_FEW` and with `_MANY` operations, so that it does not contain the call.
_FEW, _MANY = 1, 7
_REPEATS = 6
# Sizes per device: matrices, elements of a copy, and elements of a collective.
_MATRIX = (256, 512)
_ELEMENTS = 1 << 19
_SMALL, _LARGE = 64, 1 << 18
_AXES = ("groups", "members")

Step = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class MeshCosts:
    """Speed of the devices of a mesh. See the fields of `MachineCosts`."""

    flops_per_second: float
    memory_bytes_per_second: float
    collective_latency: dict[int, float]
    collective_bytes_per_second: dict[int, float]
    gather_bytes_per_second: dict[int, float]


def measure(devices: Sequence[str], deadline: float) -> MeshCosts:
    """Measures a mesh of at least two devices.

    Args:
      devices: Names of the devices.
      deadline: Value of `time.perf_counter` after which no other number of
        devices per collective is measured.
    """
    device_mesh.prepare_process()
    latency: dict[int, float] = {}
    sums: dict[int, float] = {}
    gathers: dict[int, float] = {}
    mesh = _mesh(devices, len(devices))
    product = _seconds_of_product(mesh)
    copy = _seconds_of_copy(mesh)
    for size in _group_sizes(len(devices)):
        if latency and time.perf_counter() > deadline:
            break
        mesh = _mesh(devices, size)
        latency[size] = _seconds_of_sum(mesh, _SMALL)
        sums[size] = (4 * _LARGE) / max(
            _seconds_of_sum(mesh, _LARGE) - latency[size], 1e-7
        )
        gathers[size] = (4 * _LARGE) / max(
            _seconds_of_gather(mesh, _LARGE) - latency[size], 1e-7
        )
    rows, columns = _MATRIX
    return MeshCosts(
        2 * rows * columns * columns / product,
        4 * _ELEMENTS / copy,
        latency,
        sums,
        gathers,
    )


def _group_sizes(num_devices: int) -> list[int]:
    """Returns the numbers of devices per collective, the largest one first.

    >>> _group_sizes(8), _group_sizes(6)
    ([8, 2, 4], [6, 2])
    """
    smaller = [2**i for i in range(1, num_devices.bit_length())]
    return [num_devices] + [
        size
        for size in smaller
        if size < num_devices and num_devices % size == 0
    ]


def _mesh(devices: Sequence[str], size: int) -> Any:
    """Returns a mesh whose axis `members` has `size` devices."""
    return dtensor.create_mesh(
        list(zip(_AXES, (len(devices) // size, size))), devices=list(devices)
    )


def _seconds_of_product(mesh: Any) -> float:
    rows, columns = _MATRIX
    matrix = _ones(mesh, [columns, columns], [None, None])

    def step(x: Any) -> Any:
        return tf.linalg.matmul(x, matrix)

    return _seconds_per_step(_ones(mesh, [rows, columns]), step)


def _seconds_of_copy(mesh: Any) -> float:
    """Returns the time of an operation on two tensors."""
    other = _ones(mesh, [_ELEMENTS], [None])

    def step(x: Any) -> Any:
        return tf.maximum(x, other) * 0.5

    return _seconds_per_step(_ones(mesh, [_ELEMENTS]), step) / 2


def _seconds_of_sum(mesh: Any, count: int) -> float:
    """Returns the time of an all-reduce in each group of devices."""
    size = mesh.dim_size(_AXES[1])
    parts = _ones(mesh, [size, count], [_AXES[1], None])
    replicated = dtensor.Layout.replicated(mesh, rank=1)

    def step(x: Any) -> Any:
        return dtensor.relayout(tf.reduce_sum(parts * x, 0), replicated)

    return _seconds_per_step(_ones(mesh, [count]), step)


def _seconds_of_gather(mesh: Any, count: int) -> float:
    """Returns the time of an all-gather in each group of devices."""
    shards = _ones(mesh, [count], [_AXES[1]])
    sharded = dtensor.Layout([_AXES[1]], mesh)
    replicated = dtensor.Layout.replicated(mesh, rank=1)

    def step(x: Any) -> Any:
        # Each device selects its shard without communication.
        return dtensor.relayout(
            shards * dtensor.relayout(x, sharded), replicated
        )

    return _seconds_per_step(_ones(mesh, [count]), step)


def _ones(
    mesh: Any, shape: Sequence[int], specs: Sequence[str | None] | None = None
) -> Any:
    """Returns a tensor of ones; without `specs`, it is replicated."""
    layout = dtensor.Layout(
        [
            dtensor.UNSHARDED if axis is None else axis
            for axis in specs or [None] * len(shape)
        ],
        mesh,
    )
    return dtensor.call_with_layout(tf.ones, layout, list(shape), tf.float32)


def _seconds_per_step(x: Any, step: Step) -> float:
    """Returns the time of a step in a function with several steps.

    Args:
      x: Input of the first step.
      step: The step. Its output is the input of the next step.
    """

    def seconds_of(count: int) -> float:
        @tf.function
        def run(x: Any) -> Any:
            for _ in range(count):
                x = step(x)
            return x

        def call() -> None:
            for part in dtensor.unpack(run(x)):
                part.numpy()

        call()
        return min(_timed(call) for _ in range(_REPEATS))

    difference = seconds_of(_MANY) - seconds_of(_FEW)
    return max(difference / (_MANY - _FEW), 1e-7)


def _timed(call: Callable[[], None]) -> float:
    """Returns the duration of a call, without waiting for other programs.

    The devices are in this process. On an idle machine, the call therefore
    takes at most the processor time of all threads, except on GPUs.
    """
    start, start_cpu = time.perf_counter(), time.process_time()
    call()
    seconds = time.perf_counter() - start
    if tf.config.list_logical_devices("GPU"):
        return seconds
    return min(seconds, time.process_time() - start_cpu)
