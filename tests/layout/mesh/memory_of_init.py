"""Measures how much memory the creation of a large weight requires.

`test_bytes_per_device` starts this program. The program prints the size of the
weight and three measurements, all in bytes. A measurement is the growth of the
peak memory of the process while it creates the weight with sharded
initialization, creates Adagrad's slot variable, and creates the weight with
initialization on the host. The eight logical devices share the memory of the
process.
"""

import json

import keras

import tf_layoutmap as tlm
from benchmarks import peak_memory
from tests.layout.meshes import layout_of, mesh_of

DIM = 1024


def make(num_rows, init):
    mesh = mesh_of(model=8)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["e.embeddings"] = layout_of(mesh, "model", None)
    with tlm.layout_map_scope(layout_map, init=init):
        layer = keras.layers.Embedding(
            num_rows, DIM, name="e", embeddings_initializer="normal"
        )
        layer.build(None)
    layer.embeddings.value.read_value()
    return layer


def build(optimizer, weight):
    optimizer.build([weight])
    # Reading the variables initializes them.
    return [v.value.read_value() for v in optimizer.variables]


def main():
    kept = []
    # Loads code and kernels before the measurement.
    for init in ("sharded", "host"):
        build(keras.optimizers.Adagrad(), make(64, init).embeddings)
    num_rows = 1 << 15
    grown = {"total": 4 * DIM * num_rows}
    # All objects are kept, because reused memory would not be counted.
    grown["sharded"] = peak_memory.extra_bytes(
        lambda: kept.append(make(num_rows, "sharded"))
    )
    optimizer = keras.optimizers.Adagrad()
    grown["slot"] = peak_memory.extra_bytes(
        lambda: kept.append(build(optimizer, kept[0].embeddings))
    )
    grown["host"] = peak_memory.extra_bytes(
        lambda: kept.append(make(num_rows, "host"))
    )
    print(json.dumps(grown))


if __name__ == "__main__":
    main()
