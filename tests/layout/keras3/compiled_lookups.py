"""Prints the ops of compiled steps whose results have the size of the table.

DTensor writes each program that it compiles to a file. `ENVIRONMENT` enables
these files. TensorFlow reads it when it is imported, so a new process runs this
program. For each case, the program trains and predicts with a model whose table
is sharded. The last line that it prints starts with FOUND.

    TF_DUMP_GRAPH_PREFIX=/tmp/programs TF_CPP_VMODULE=dtensor_mlir_passes=5 \\
        python -m tests.layout.keras3.compiled_lookups
"""

import json
import os
import pathlib
import re

import keras
import numpy as np

from tests.layout import pairs

FOLDER = "TF_DUMP_GRAPH_PREFIX"
ENVIRONMENT = {"TF_CPP_VMODULE": "dtensor_mlir_passes=5"}

# The sizes differ from all other sizes in the programs.
NUM_ROWS, DIM, LENGTH = 1000, 20, 6
IDS = np.random.default_rng(0).integers(0, NUM_ROWS, size=(16, LENGTH))
L = keras.layers


def model(dtype="float32", *, lora=False, tied=False):
    """Returns a model with the table `e`."""
    ids = keras.Input((LENGTH,), dtype="int32")
    layer = L.ReversibleEmbedding if tied else L.Embedding
    table = layer(NUM_ROWS, DIM, name="e", dtype=dtype)
    x = table(ids)
    if lora:
        table.enable_lora(4)
    x = L.Dense(DIM)(x)
    x = table(x, reverse=True) if tied else L.Dense(4)(x)
    return keras.Model(ids, L.GlobalAveragePooling1D()(x))


# Name, function that returns the model, and axes of the table.
CASES = [
    ("rows", model, ("model", None)),
    ("both", model, ("model", "batch")),
    ("columns", model, (None, "batch")),
    ("bfloat16", lambda: model("bfloat16"), ("model", None)),
    ("lora", lambda: model(lora=True), ("model", None)),
    ("tied rows", lambda: model(tied=True), ("model", None)),
    ("tied both", lambda: model(tied=True), ("model", "batch")),
    ("tied swapped", lambda: model(tied=True), ("batch", "model")),
    ("tied lora", lambda: model(tied=True, lora=True), ("model", "batch")),
]


def full_results() -> list[str]:
    """Returns the ops whose results have the shape of the table or more.

    The shapes in the programs are the shapes on one device. The files are
    deleted.
    """
    found = set()
    for path in pathlib.Path(os.environ[FOLDER]).iterdir():
        if "after_DTensorSPMDExpansion" in path.name:
            for line in path.read_text().splitlines():
                found.update(_full_results_of(line))
        path.unlink()
    return sorted(found)


def _full_results_of(line: str) -> list[str]:
    op = re.search(r'"(tf\.\w+)"\(', line)
    if op is None:
        return []
    results = line.rsplit("->", 1)[-1]
    return [
        f"{op[1]} {shape}"
        for shape in re.findall(r"tensor<((?:\d+x)+)\w+>", results)
        if _contains_table([int(size) for size in shape.split("x")[:-1]])
    ]


def _contains_table(sizes: list[int]) -> bool:
    return NUM_ROWS in sizes and DIM in sizes


def main() -> None:
    found = {}
    for name, make, axes in [
        *CASES,
        # DTensor gathers the table of this case, which must be detected.
        ("quantized", model, ("model", None)),
    ]:
        one = pairs.on_mesh(make, {"e.embeddings": axes})
        if name == "quantized":
            one.get_layer("e").quantize("int8")
        else:
            pairs.fit(one, IDS, IDS[:, 0] % 4, epochs=1)
        one.predict(IDS, batch_size=8, verbose=0)
        found[name] = full_results()
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
