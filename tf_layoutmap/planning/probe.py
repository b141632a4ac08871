"""Measures `MachineCosts` in at most 10 seconds, once per machine.

Rows are measured with steps of a `TPUEmbedding`, so that the times contain the
work of the engine. If the program has several logical devices, products, copies
and collectives are measured on all devices of the mesh at the same time (see
`mesh_probe.py`). Servers are measured if the program is connected to servers;
otherwise a connection of this machine to itself is measured.
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
from tf_layoutmap.planning import mesh_probe
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
# Bytes that a server copies to measure whether servers share processors.
_COPIED_BYTES = 16 << 20

_lock = threading.Lock()


def machine(
    path: str | os.PathLike[str] | None = None, num_devices: int | None = None
) -> MachineCosts:
    """Returns the costs of this machine from a cache file, or measures them.

    Args:
      path: Path of the cache file; see `costs.cache_path`. If the file cannot
        be written, the costs are measured in each process.
      num_devices: Number of devices of the mesh; None for all local devices.
        The program can have fewer devices.
    """
    where = machine_costs.cache_path(path)
    with _lock:
        devices = _mesh_devices(num_devices)
        key = machine_costs.machine_name() + ", " + _devices_name(devices)
        costs = machine_costs.read_cache(where, key)
        if costs is None:
            costs = _measured_in_thread(devices)
            try:
                files.make_parent(where)
                text = machine_costs.cache_text(where, key, costs)
                files.write_text(where, text)
            except OSError:
                pass
        return costs


def _measured_in_thread(devices: Sequence[str]) -> MachineCosts:
    """Calls `measure` in a thread, outside of strategies and scopes."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(measure, devices).result()


def _devices_name(devices: Sequence[str] = ()) -> str:
    return f"{len(devices)} devices, {len(_server_devices())} servers"


def measure(devices: Sequence[str] = ()) -> MachineCosts:
    """Measures the costs of this machine in at most 10 seconds.

    Args:
      devices: Names of the devices of a mesh; empty for no mesh.
    """
    deadline = time.perf_counter() + _SECONDS
    with tf.init_scope():
        latency, speed, sharing = _server_costs()
        mesh = (
            mesh_probe.measure(devices, deadline - 3)
            if devices
            else _costs_without_mesh()
        )
        row_seconds, id_seconds, table_seconds = _rows(deadline)
    return MachineCosts(
        row_seconds,
        table_seconds,
        id_seconds,
        mesh.flops_per_second,
        mesh.memory_bytes_per_second,
        mesh.collective_latency,
        mesh.collective_bytes_per_second,
        mesh.gather_bytes_per_second,
        latency,
        speed,
        sharing,
    )


def _costs_without_mesh() -> mesh_probe.MeshCosts:
    return mesh_probe.MeshCosts(
        _flops_per_second(),
        _memory_bandwidth(),
        {2: _DEFAULT_LATENCY},
        {2: _DEFAULT_BYTES_PER_SECOND},
        {2: 2 * _DEFAULT_BYTES_PER_SECOND},
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
    ascending: dict[int, float] = {}
    largest = 0.0
    for size, seconds in sorted(row_seconds.items()):
        largest = ascending[size] = max(largest, seconds)
    return ascending


def _seconds_per_table() -> float:
    """Returns the time of another table in a step, with 16 ids."""
    ids = [np.arange(16)] * (2 * _STEPS)
    single, several = (
        _step_seconds(_step_of_tables(64, 8, count), ids)
        for count in (1, 1 + _MORE_TABLES)
    )
    return max((several - single) / _MORE_TABLES, 1e-6)


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
        embedding.apply_gradients(
            [activation + 1.0 for activation in activations]
        )
        return tf.reduce_sum(activations[0][:1])

    return step


def _step_seconds(step: Callable[[Any], Any], batches: Sequence[Any]) -> float:
    tensors = [tf.constant(batch, tf.int64) for batch in batches]
    step(tensors[0]).numpy()
    seconds = []
    for ids in tensors[1:]:
        start = time.perf_counter()
        step(ids).numpy()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _mesh_devices(num_devices: int | None = None) -> list[str]:
    """Returns the local logical devices of the type that meshes use.

    In a cluster, the list has no devices, because all processes of a mesh would
    have to measure together.

    Args:
      num_devices: Number of devices of the mesh; None for all devices.
    """
    for kind in ("GPU", "CPU"):
        names = [
            device.name
            for device in tf.config.list_logical_devices(kind)
            if "/job:localhost/" in device.name or "/job:" not in device.name
        ]
        names = names[:num_devices]
        if len(names) > 1:
            return names
    return []


def _server_devices() -> list[str]:
    return [
        device.name
        for device in tf.config.list_logical_devices("CPU")
        if "/job:ps/" in device.name
    ]


def _server_costs() -> tuple[float, float, float]:
    """Returns the latency of a call to a server, bytes per second, and sharing.

    See the fields of `MachineCosts`.
    """
    servers = _server_devices()
    if servers:
        return (*_remote_costs(servers), _sharing(servers))
    return (*_loopback_costs(), 1.0)


def _remote_costs(devices: Sequence[str]) -> tuple[float, float]:
    """Returns the time of a call per server, and bytes per second."""
    small_size, large_size = 16, 1 << 20

    @tf.function
    def send(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(devices[0]):
            return tensor + 1.0

    @tf.function
    def send_to_all(tensor: tf.Tensor) -> tf.Tensor:
        sent = []
        for device in devices:
            with tf.device(device):
                sent.append(tensor + 1.0)
        return tf.add_n(sent)

    small = tf.zeros([small_size])
    large = tf.zeros([large_size])
    latency = _best(lambda: send(small).numpy(), 20)
    seconds = _best(lambda: send(large).numpy())
    if len(devices) > 1:
        # A step calls all servers, one after another, without waiting.
        more = _best(lambda: send_to_all(small).numpy(), 20) - latency
        per_server = max(more / (len(devices) - 1), 0.1 * latency)
    else:
        per_server = latency
    return per_server, 2 * 4 * large_size / max(seconds - latency, 1e-6)


def _sharing(devices: Sequence[str]) -> float:
    """Returns how many times as long servers take if all of them work."""
    if len(devices) < 2:
        return 1.0

    def seconds_on(used: Sequence[str]) -> float:
        @tf.function
        def work(value: tf.Tensor) -> tf.Tensor:
            results = []
            for device in used:
                with tf.device(device):
                    x = tf.fill([_COPIED_BYTES // 4], value)
                    for _ in range(4):
                        x = tf.sin(x)
                    results.append(x[0])
            return tf.add_n(results)

        return _best(lambda: work(tf.constant(0.5)).numpy())

    return max(seconds_on(devices) / seconds_on(devices[:1]), 1.0)


def _loopback_costs() -> tuple[float, float]:
    """Measures a TCP connection of this machine to itself."""
    num_bytes = 4 << 20
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(
            target=_echo, args=[listener, num_bytes], daemon=True
        ).start()
        with socket.create_connection(listener.getsockname(), 5) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            small, large = b"x", bytes(num_bytes)

            def call(message: bytes) -> None:
                connection.sendall(len(message).to_bytes(8, "big") + message)
                connection.recv(1)

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
