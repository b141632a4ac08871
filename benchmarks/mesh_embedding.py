"""One training step of a table whose rows are sharded over a mesh.

The batch has 4,096 ids, the rows have 64 columns, the optimizer is SGD and the
mesh is 2x2 logical CPUs. Contestants:

* `tlm.100k`, `tlm.400k`, `tlm.4m`: `tlm.layers.ShardedEmbedding` under
  `tlm.layout_map_scope`. The name contains the number of rows. A step is a step
  of `fit`, which includes the copy of the batch to the mesh and the copy of the
  loss to the host.
* `dtensor.400k`: DTensor's own operations, which gather the table for a lookup
  and train the table with a dense gradient of all rows.

The ids of all contestants refer to the same number of distinct rows, which is
the size of the smallest table. In larger tables, these rows are evenly spaced.
The benchmark also measures how much the peak memory grows during the first two
steps, which include compilation. Each contestant runs in a separate process
while its memory is measured.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import rich.table

from benchmarks import peak_memory, timing, workloads

NUM_IDS = 4096
DIM = 64
LEARNING_RATE = 0.05
SIZES = {"100k": 100_000, "400k": 400_000, "4m": 4_000_000}
CONTESTANTS = (*(f"tlm.{size}" for size in SIZES), "dtensor.400k")
_PEAKS = ("tlm.400k", "dtensor.400k")


def _mesh():
    """Returns a 2x2 mesh; call it before TensorFlow's first operation."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    if not tf.config.get_logical_device_configuration(cpu):
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 4
        )
    return tf.experimental.dtensor.create_mesh(
        [("batch", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(4)]
    )


def _ours(num_rows: int) -> Callable[[np.ndarray, np.ndarray], float]:
    """Returns a step that runs the training function of `fit`."""
    import keras
    import tensorflow as tf

    import tf_layoutmap as tlm

    mesh = _mesh()
    layout_map = tlm.LayoutMap(mesh)
    layout_map["words.embeddings"] = tf.experimental.dtensor.Layout(
        ["model", "unsharded"], mesh
    )
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [
                keras.Input((), dtype="int64"),
                tlm.layers.ShardedEmbedding(
                    num_rows,
                    DIM,
                    name="words",
                    optimizer=tf.tpu.experimental.embedding.SGD(LEARNING_RATE),
                ),
            ]
        )
    model.compile("sgd", loss=lambda y, rows: keras.ops.sum(y * rows, axis=1))
    step = model.make_train_function()
    return lambda ids, y: float(step(iter([(ids, y)]))["loss"])


def _stock(num_rows: int) -> Callable[[np.ndarray, np.ndarray], float]:
    """Returns a step that uses only DTensor's own operations."""
    import tensorflow as tf

    import tf_layoutmap as tlm

    dtensor = tf.experimental.dtensor
    mesh = _mesh()
    table = dtensor.DVariable(
        dtensor.call_with_layout(
            tf.zeros,
            dtensor.Layout(["model", "unsharded"], mesh),
            shape=(num_rows, DIM),
        )
    )

    @tf.function
    def run(ids, y):
        with tf.GradientTape() as tape:
            rows = tf.gather(table.read_value(), ids)
            loss = tf.reduce_mean(tf.reduce_sum(y * rows, axis=1))
        gradient = tf.convert_to_tensor(tape.gradient(loss, table))
        table.assign_sub(LEARNING_RATE * gradient)
        return loss

    def step(ids, y):
        ids, y = (
            tlm.layout.to_mesh(
                value, dtensor.Layout.batch_sharded(mesh, "batch", value.ndim)
            )
            for value in (ids, y)
        )
        loss = float(tlm.layout.to_host(run(ids, y)))
        # Reading the table waits for the end of the step.
        dtensor.unpack(table.read_value())[0][0].numpy()
        return loss

    return step


class _Contestant:
    """A step function and the batches that it processes."""

    def __init__(self, name: str, distribution: str):
        owner, size = name.split(".")
        num_rows = SIZES[size]
        rng = np.random.default_rng(7)
        num_drawn = min(SIZES.values())
        self._batches = [
            workloads.draw_ids(rng, distribution, NUM_IDS, num_drawn)
            * (num_rows // num_drawn)
            for _ in range(4)
        ]
        self._y = rng.standard_normal((NUM_IDS, DIM)).astype(np.float32)
        self._step = {"tlm": _ours, "dtensor": _stock}[owner](num_rows)

    def __call__(self, i: int) -> float:
        return self._step(self._batches[i % 4], self._y)


def _measure_times(distribution: str, rounds: int) -> dict[str, float]:
    contestants = {
        name: _Contestant(name, distribution) for name in CONTESTANTS
    }
    # The contestant without this package runs last: it replaces the contents of
    # the processor caches, so the next contestant would be slower.
    stock = contestants.pop("dtensor.400k")
    # The steps of the other contestants take only a few milliseconds, so a
    # stable median requires more rounds.
    times = timing.interleave(contestants, 3 * rounds, warm_up=6)
    times |= timing.interleave({"dtensor.400k": stock}, rounds)
    return {name: float(np.median(values)) for name, values in times.items()}


def _measure_peak(name: str, distribution: str) -> float:
    contestant = _Contestant(name, distribution)
    return peak_memory.extra_bytes(
        lambda: [contestant(i) for i in range(2)]
    ) / (1 << 20)


def _in_a_process(*arguments: str) -> object:
    """Runs this module in a new process and returns the last printed value.

    A new process is required for two reasons. Logical devices must be
    configured before TensorFlow's first operation. In addition, a process may
    keep freed memory, so that its peak memory would include earlier steps.
    """
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.mesh_embedding", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians, peaks and ratios."""
    median = _in_a_process("times", distribution, str(rounds))
    peaks = {}
    if peak_memory.is_available():
        peaks = {
            name: _in_a_process("peak", distribution, name) for name in _PEAKS
        }
    table = rich.table.Table(
        title=f"Training step on a 2x2 mesh, {NUM_IDS} ids, {distribution}, "
        f"{DIM} columns, SGD"
    )
    for column in (
        "table",
        "rows",
        "step",
        "/ small table",
        "DTensor / tlm",
        "peak",
        "DTensor / tlm",
    ):
        table.add_column(column, justify="right")
    ours, stock = _PEAKS
    for name, value in median.items():
        owner, size = name.split(".")
        is_pair = name == ours and bool(peaks)
        table.add_row(
            {"tlm": "ShardedEmbedding", "dtensor": "stock DTensor"}[owner],
            f"{SIZES[size]:,}",
            f"{value:.1f} ms",
            f"{value / median['tlm.100k']:.2f}",
            f"{median[stock] / value:.1f}" if name == ours else "",
            f"{peaks[name]:.0f} MiB" if name in peaks else "",
            f"{peaks[stock] / peaks[ours]:.1f}" if is_pair else "",
        )
    return table, {
        **median,
        **{f"{name}.peak_mib": value for name, value in peaks.items()},
    }


def main(argv: list[str]) -> None:
    measurement, distribution, argument = argv
    if measurement == "times":
        print(json.dumps(_measure_times(distribution, int(argument))))
    else:
        print(json.dumps(_measure_peak(argument, distribution)))


if __name__ == "__main__":
    main(sys.argv[1:])
