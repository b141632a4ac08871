"""Measures the memory that the creation of a large weight takes.

`test_bytes_per_device` starts this program. It prints four numbers of bytes:
the size of the weight, and the peak growth of the process when it creates the
weight with sharded initialization, when it creates Adagrad's slot, and when it
initializes the weight on the host. The eight logical devices share the memory
of the process.
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
    # Variables are initialized when they are first read.
    return [v.value.read_value() for v in optimizer.variables]


def main():
    kept = []
    # This loop loads code and kernels before the measurement.
    for init in ("sharded", "host"):
        build(keras.optimizers.Adagrad(), make(64, init).embeddings)
    num_rows = 1 << 15
    grown = {"total": 4 * DIM * num_rows}
    # All objects are kept, because freed memory would be reused without being
    # counted.
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
