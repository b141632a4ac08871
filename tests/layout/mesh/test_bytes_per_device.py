"""Checks how many bytes each of eight devices holds."""

import collections
import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import peak_memory
from tests.layout.meshes import layout_of, mesh_of

ROOT = pathlib.Path(__file__).parents[3]
dtensor = tf.experimental.dtensor
rules = tf.tpu.experimental.embedding

MESHES = {
    "2x4": dict(batch=2, model=4),
    "1x8": dict(batch=1, model=8),
    "8x1": dict(batch=8, model=1),
}
NUM_ROWS, DIM = 64, 16
IDS = np.random.default_rng(0).integers(0, NUM_ROWS, (32, 3))
FEATURES = np.random.default_rng(0).normal(size=(32, DIM)).astype(np.float32)


def bytes_of(variable):
    """Returns the bytes that each device holds of one variable on a mesh."""
    held = collections.Counter()
    for part in dtensor.unpack(variable.value.read_value()):
        held[part.device] += part.numpy().nbytes
    return held


def assert_sharded(variables, shares):
    """Checks that no device holds more than 1.05/`shares` of all bytes."""
    held, total = collections.Counter(), 0
    for variable in variables:
        held.update(bytes_of(variable))
        total += variable.numpy().nbytes
    assert len(held) == 8
    assert max(held.values()) <= total / shares * 1.05
    assert sum(held.values()) >= total  # The devices together hold all bytes.


def trained(layers, axes, sizes, x, optimizer):
    mesh = mesh_of(**sizes)
    layout_map = tlm.LayoutMap(mesh)
    for key, value in axes.items():
        layout_map[key] = layout_of(mesh, *value)
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [keras.Input(x.shape[1:], dtype=x.dtype.name), *layers()]
        )
    model.compile(optimizer, "mse")
    model.fit(
        x,
        np.zeros([32, *model.output_shape[1:]], np.float32),
        batch_size=16,
        verbose=0,
    )
    return model


def slots_of(model, weight):
    return [v for v in model.optimizer.variables if v.shape == weight.shape]


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(
    "axes",
    [(None, "model"), ("model", None), ("batch", "model"), ("batch", None)],
    ids=str,
)
def test_weight_and_its_slots_are_sharded_over_their_axes(sizes, axes):
    model = trained(
        lambda: [keras.layers.Dense(32, use_bias=False, name="d")],
        {"d.kernel": axes},
        sizes,
        FEATURES,
        "adam",
    )

    kernel = model.layers[0].kernel
    slots = slots_of(model, kernel)
    assert len(slots) == 2
    shares = int(np.prod([sizes[axis] for axis in axes if axis]))
    assert_sharded([kernel, *slots], shares)


@pytest.mark.covering(1)
@pytest.mark.parametrize("axes", [("model", None), (None, "model")], ids=str)
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_keras_embedding_is_sharded_by_rows_and_by_columns(rule, axes):
    model = trained(
        lambda: [keras.layers.Embedding(NUM_ROWS, DIM, name="e")],
        {"e.embeddings": axes},
        MESHES["2x4"],
        IDS,
        rule,
    )

    table = model.layers[0].embeddings
    slots = slots_of(model, table)
    assert len(slots) == {"sgd": 0, "adagrad": 1, "adam": 2}[rule]
    assert_sharded([table, *slots], 4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", ["2x4", "1x8"])
@pytest.mark.parametrize(
    "rule",
    [rules.SGD(0.1), rules.Adagrad(0.1), rules.Adam(0.1)],
    ids=lambda rule: type(rule).__name__,
)
def test_sharded_embedding_is_sharded_by_rows(rule, sizes):
    model = trained(
        lambda: [
            tlm.layers.ShardedEmbedding(NUM_ROWS, DIM, optimizer=rule, name="e")
        ],
        {"e.embeddings": ("model", None)},
        MESHES[sizes],
        IDS,
        "sgd",
    )

    layer = model.layers[0]
    slots = list(layer.optimizer.slots.values())
    assert len(slots) == len(rule._slot_names())
    assert_sharded([layer.embeddings, *slots], MESHES[sizes]["model"])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(
    not peak_memory.is_available(), reason="this system does not count peaks"
)
def test_weight_and_its_slot_are_created_without_a_full_copy():
    # A new process is used, because the reuse of memory that earlier tests
    # freed would not be counted.
    run = subprocess.run(
        [sys.executable, "-m", "tests.layout.mesh.memory_of_init"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    grown = json.loads(run.stdout.splitlines()[-1])
    total = grown["total"]
    # All devices belong to this process and together hold the weight.
    for name in ("rows", "columns", "slot"):
        assert total <= grown[name] <= 1.1 * total, name
    # The host computes the full value first, which the measurement must detect.
    assert grown["full"] >= 2 * total
