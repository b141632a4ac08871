"""Measures `MachineCosts` in at most 10 seconds, once per machine.

Rows are measured with steps of a `TPUEmbedding`, so that the times contain the
work of the engine. Collectives are measured if the program has several logical
devices. Servers are measured if the program is connected to servers; otherwise
a connection of this machine to itself is measured.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import files
from tf_layoutmap.embedding import tpu_embedding
from tf_layoutmap.planning import costs as machine_costs
from tf_layoutmap.planning.costs import MachineCosts

# After this time, no further sizes are measured.
_SECONDS = 7.0
# Bytes of a table and its slot variables. A table must be larger than the
# caches of the processor.
_TABLE_BYTES = 96 << 20
_DIMS = (32, 8, 128)
_FEW_IDS, _MANY_IDS = 512, 8192
# Number of additional tables with which the time of a table is measured.
_MORE_TABLES = 8
# Steps per measurement; the shortest one counts.
_STEPS = 9
# Values that are used if a program has only one device.
_DEFAULT_LATENCY, _DEFAULT_BYTES_PER_SECOND = 200e-6, 2e9

_lock = threading.Lock()


def machine(path: str | os.PathLike[str] | None = None) -> MachineCosts:
    """Returns the costs of this machine from a cache file, or measures them.

    Args:
      path: Path of the cache file; see `costs.cache_path`. If the file cannot
        be written, the costs are measured in each process.
    """
    where = machine_costs.cache_path(path)
    with _lock:
        key = f"{machine_costs.machine_name()}, {_devices_name()}"
        found = machine_costs.read_cache(where, key)
        if found is None:
            found = _measured_in_thread()
            try:
                files.make_parent(where)
                text = machine_costs.cache_text(where, key, found)
                files.write_text(where, text)
            except OSError:
                pass
        return found


def _measured_in_thread() -> MachineCosts:
    """Calls `measure` in a thread, outside of strategies and scopes."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


def _devices_name() -> str:
    servers = len(_server_devices())
    return f"{len(_mesh_devices())} devices, {servers} servers"


def measure() -> MachineCosts:
    """Measures the costs of this machine in at most 10 seconds."""
    deadline = time.perf_counter() + _SECONDS
    with tf.init_scope():
        bandwidth = _memory_bandwidth()
        flops = _flops_per_second()
        server_latency, server_speed = _server_costs()
        latency, speed = _collectives(deadline)
        row_seconds, id_seconds, table_seconds = _rows(deadline)
    return MachineCosts(
        row_seconds,
        table_seconds,
        id_seconds,
        flops,
        bandwidth,
        latency,
        speed,
        server_latency,
        server_speed,
    )


def _best(function: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the shortest time of a call, after one call for warm-up."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)


def _memory_bandwidth() -> float:
    source = np.ones(4 << 20, np.float32)
    target = np.empty_like(source)
    return source.nbytes / _best(lambda: np.copyto(target, source))


def _flops_per_second() -> float:
    size = 512
    with tf.device("/device:CPU:0"):
        matrix = tf.ones([size, size])
        seconds = _best(lambda: tf.linalg.matmul(matrix, matrix).numpy())
    return 2 * size**3 / seconds


def _rows(deadline: float) -> tuple[dict[int, float], float, float]:
    """Returns the times of rows by size, of an id, and of a table."""
    row_seconds: dict[int, float] = {}
    id_seconds = table_seconds = 1e-9
    for dim in _DIMS:
        if row_seconds and time.perf_counter() > deadline:
            break
        row_bytes = 8 * dim
        num_rows = _TABLE_BYTES // row_bytes
        step = _step_of_tables(num_rows, dim, 1)
        rng = np.random.default_rng(0)
        few = rng.choice(num_rows, _FEW_IDS, replace=False)
        # Each measurement uses other rows, which are not in a cache.
        many = [
            rng.choice(num_rows, _MANY_IDS, replace=False)
            for _ in range(_STEPS)
        ]
        few_seconds = _step_seconds(step, [few] * _STEPS)
        many_seconds = _step_seconds(step, many)
        if not row_seconds:
            repeated = np.resize(few, _MANY_IDS)
            id_seconds = max(
                (_step_seconds(step, [repeated] * _STEPS) - few_seconds)
                / (_MANY_IDS - _FEW_IDS),
                1e-9,
            )
            table_seconds = _seconds_per_table()
        seconds = max(many_seconds - few_seconds, 1e-6) / (_MANY_IDS - _FEW_IDS)
        # Other programs disturb the measurements, so that the difference may
        # be too small.
        row_seconds[row_bytes] = max(seconds - id_seconds, 0.3 * seconds)
    return _ascending(row_seconds), id_seconds, table_seconds


def _ascending(row_seconds: dict[int, float]) -> dict[int, float]:
    """Returns the times in the order of sizes, without decreasing times."""
    found: dict[int, float] = {}
    largest = 0.0
    for size, seconds in sorted(row_seconds.items()):
        largest = found[size] = max(largest, seconds)
    return found


def _seconds_per_table() -> float:
    """Returns the time of another table in a step, with 16 ids."""
    ids = [np.arange(16)] * (2 * _STEPS)
    one, several = (
        _step_seconds(_step_of_tables(64, 8, count), ids)
        for count in (1, 1 + _MORE_TABLES)
    )
    return max((several - one) / _MORE_TABLES, 1e-6)


def _step_of_tables(
    num_rows: int, dim: int, count: int
) -> Callable[[Any], Any]:
    """Returns a function that trains tables with Adagrad and equal ids."""
    tpu: Any = tf.tpu.experimental.embedding  # pyright: ignore
    embedding = tpu_embedding.TPUEmbedding(
        [
            tpu.FeatureConfig(
                tpu.TableConfig(
                    num_rows,
                    dim,
                    tf.zeros_initializer(),
                    combiner="sum",
                    name=f"measured_{index}",
                )
            )
            for index in range(count)
        ],
        tpu.Adagrad(0.1),
        engine="host",
    )
    embedding.build()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids: tf.Tensor) -> tf.Tensor:
        embedding.enqueue([ids] * count)
        activations = embedding.dequeue()
        embedding.apply_gradients([one + 1.0 for one in activations])
        return tf.reduce_sum(activations[0][:1])

    return step


def _step_seconds(step: Callable[[Any], Any], batches: Sequence[Any]) -> float:
    tensors = [tf.constant(one, tf.int64) for one in batches]
    step(tensors[0]).numpy()
    seconds = []
    for one in tensors[1:]:
        start = time.perf_counter()
        step(one).numpy()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _mesh_devices() -> list[str]:
    """Returns the local logical devices of the type that meshes use.

    In a cluster, the list has no devices, because all processes of a mesh would
    have to measure together.
    """
    for kind in ("GPU", "CPU"):
        found = [
            one.name
            for one in tf.config.list_logical_devices(kind)
            if "/job:localhost/" in one.name or "/job:" not in one.name
        ]
        if len(found) > 1:
            return found
    return []


def _collectives(
    deadline: float,
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the latency and the speed of an all-reduce by device count."""
    devices = _mesh_devices()
    latency: dict[int, float] = {}
    speed: dict[int, float] = {}
    size = 2
    sizes = []
    while size <= min(len(devices), 16):
        sizes.append(size)
        size *= 2
    # The largest number is measured first, because it is used most often.
    for count in reversed(sizes):
        if latency and time.perf_counter() > deadline - 3:
            break
        small = _all_reduce_seconds(devices[:count], 16)
        large_size = 1 << 19
        large = _all_reduce_seconds(devices[:count], large_size)
        latency[count] = small
        speed[count] = 4 * large_size / max(large - small, 1e-7)
    if not latency:
        return {2: _DEFAULT_LATENCY}, {2: _DEFAULT_BYTES_PER_SECOND}
    return dict(sorted(latency.items())), dict(sorted(speed.items()))


def _all_reduce_seconds(devices: Sequence[str], size: int) -> float:
    dtensor: Any = tf.experimental.dtensor
    mesh = dtensor.create_mesh([("all", len(devices))], devices=list(devices))
    sharded = dtensor.Layout(["all", dtensor.UNSHARDED], mesh)
    replicated = dtensor.Layout.replicated(mesh, rank=1)
    value = dtensor.call_with_layout(
        tf.ones, sharded, [len(devices), size], tf.float32
    )

    @tf.function
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        return dtensor.relayout(tf.reduce_sum(tensor, 0), replicated)

    def call() -> None:
        # All devices have the result when the first one has been copied.
        dtensor.unpack(reduce(value))[0].numpy()

    return _best(call, 4)


def _server_devices() -> list[str]:
    return [
        one.name
        for one in tf.config.list_logical_devices("CPU")
        if "/job:ps/" in one.name
    ]


def _server_costs() -> tuple[float, float]:
    """Returns the latency of a call to a server, and bytes per second."""
    servers = _server_devices()
    if servers:
        return _remote_costs(servers[0])
    return _loopback_costs()


def _remote_costs(device: str) -> tuple[float, float]:
    small_size, large_size = 16, 1 << 20

    @tf.function
    def send(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            return tensor + 1.0

    small = tf.zeros([small_size])
    large = tf.zeros([large_size])
    latency = _best(lambda: send(small).numpy())
    seconds = _best(lambda: send(large).numpy())
    return latency, 2 * 4 * large_size / max(seconds - latency, 1e-6)


def _loopback_costs() -> tuple[float, float]:
    """Measures a TCP connection of this machine to itself."""
    num_bytes = 4 << 20
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(
            target=_echo, args=[listener, num_bytes], daemon=True
        ).start()
        with socket.create_connection(listener.getsockname(), 5) as one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            small, large = b"x", bytes(num_bytes)

            def call(message: bytes) -> None:
                one.sendall(len(message).to_bytes(8, "big") + message)
                one.recv(1)

            latency = _best(lambda: call(small), 20)
            seconds = _best(lambda: call(large), 3)
    # A call of TensorFlow runs several ops and threads in both processes.
    return latency + _DEFAULT_LATENCY, num_bytes / max(seconds - latency, 1e-6)


def _echo(listener: socket.socket, num_bytes: int) -> None:
    connection, _ = listener.accept()
    buffer = bytearray(num_bytes)
    with connection:
        while True:
            header = connection.recv(8, socket.MSG_WAITALL)
            if len(header) < 8:
                return
            left = int.from_bytes(header, "big")
            while left:
                left -= connection.recv_into(buffer, min(left, num_bytes))
            connection.sendall(b"x")
