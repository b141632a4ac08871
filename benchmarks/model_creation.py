"""Creation of a Keras model of 1,000 variables with and without a layout map.

The model has 500 Dense layers of 8 units. Four patterns shard their kernels and
biases over a 2x2 mesh of logical CPUs. Contestants:

* `keras`: the model without a layout map.
* `tlm`: the model under `tlm.layout_map_scope`. Each device draws the initial
  values of its own shards.

The program measures how long it takes to create the model with all initial
values and to delete the model. The benchmark uses no ids, so `--distributions`
has no effect.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import rich.table

from benchmarks import timing

NUM_LAYERS = 500
UNITS = 8
CONTESTANTS = ("keras", "tlm")


def _contestants() -> dict[str, Callable[[int], None]]:
    import keras
    import tensorflow as tf

    import tf_layoutmap as tlm

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 4
    )
    dtensor = tf.experimental.dtensor
    mesh = dtensor.create_mesh(
        [("batch", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(4)]
    )

    def make() -> None:
        model = keras.Sequential(
            [
                keras.Input([UNITS]),
                *(
                    keras.layers.Dense(UNITS, name=f"d{i}")
                    for i in range(NUM_LAYERS)
                ),
            ]
        )
        model.weights[-1].numpy()

    def under_the_scope() -> None:
        layout_map = tlm.LayoutMap(mesh)
        for parity, axes in (
            ("[02468]", ["unsharded", "model"]),
            ("[13579]", ["model", "unsharded"]),
        ):
            layout_map[rf"d\d*{parity}\.kernel"] = dtensor.Layout(axes, mesh)
            layout_map[rf"d\d*{parity}\.bias"] = dtensor.Layout(axes[1:], mesh)
        with tlm.layout_map_scope(layout_map):
            make()

    return {
        "keras": lambda i: make(),
        "tlm": lambda i: under_the_scope(),
    }


def _measure(rounds: int) -> dict[str, float]:
    import keras

    def tidy(make):
        def call(i):
            make(i)
            keras.backend.clear_session()
            gc.collect()

        return call

    times = timing.interleave(
        {name: tidy(make) for name, make in _contestants().items()},
        rounds,
        warm_up=1,
    )
    return {name: float(np.median(values)) for name, values in times.items()}


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    del distribution
    # Logical devices must be set before TensorFlow's first operation.
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.model_creation",
            str(min(rounds, 5)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    median = json.loads(run.stdout.splitlines()[-1])
    table = rich.table.Table(
        title=f"Creation of a model of {2 * NUM_LAYERS:,} variables"
    )
    for column in ("contestant", "time", "/ keras"):
        table.add_column(column, justify="right")
    for name in CONTESTANTS:
        table.add_row(
            name,
            f"{median[name]:.0f} ms",
            f"{median[name] / median['keras']:.2f}",
        )
    return table, median


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
