"""Measures how much memory the creation of a large weight requires.

`test_bytes_per_device` starts this program. The program prints the size of the
weight and four measurements, all in bytes. A measurement is the growth of the
peak memory of the process while it creates a weight that is sharded by rows,
creates Adagrad's slot variable of this weight, creates a weight that is sharded
by columns, and creates a weight whose initializer can only compute the full
value. The eight logical devices share the memory of the process.
"""

import json

import keras
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import peak_memory
from tests.layout.meshes import layout_of, mesh_of

DIM = 1024
ROWS, COLUMNS = ("model", None), (None, "model")


def make(num_rows, axes, initializer="normal"):
    mesh = mesh_of(model=8)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["e.embeddings"] = layout_of(mesh, *axes)
    with tlm.layout_map_scope(layout_map):
        layer = keras.layers.Embedding(
            num_rows, DIM, name="e", embeddings_initializer=initializer
        )
        layer.build(None)
    layer.embeddings.value.read_value()
    return layer


def full_value(shape, dtype=None):
    return tf.random.stateless_normal(shape, [1, 2], dtype=dtype)


def build(optimizer, weight):
    optimizer.build([weight])
    # Reading the variables initializes them.
    return [v.value.read_value() for v in optimizer.variables]


def main():
    kept = []
    # Loads code and kernels before the measurement.
    for axes in (ROWS, COLUMNS):
        build(keras.optimizers.Adagrad(), make(64, axes).embeddings)
    num_rows = 1 << 15
    grown = {"total": 4 * DIM * num_rows}
    # All objects are kept, because reused memory would not be counted.
    grown["rows"] = peak_memory.extra_bytes(
        lambda: kept.append(make(num_rows, ROWS))
    )
    optimizer = keras.optimizers.Adagrad()
    grown["slot"] = peak_memory.extra_bytes(
        lambda: kept.append(build(optimizer, kept[0].embeddings))
    )
    grown["columns"] = peak_memory.extra_bytes(
        lambda: kept.append(make(num_rows, COLUMNS))
    )
    grown["full"] = peak_memory.extra_bytes(
        lambda: kept.append(make(num_rows, ROWS, full_value))
    )
    print(json.dumps(grown))


if __name__ == "__main__":
    main()
