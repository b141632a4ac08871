"""Checks lookups and updates of tables in all layouts and dtypes.

The kernels support only float32 tables with unsharded columns. The other tables
use ops that DTensor shards.
"""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.keras3 import compiled_lookups
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tests.processes import ROOT
from tf_layoutmap.layout.keras3 import sharded_rows
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError

dtensor = tf.experimental.dtensor
L = keras.layers

LAYOUTS = [
    ("model", "batch"),
    ("batch", "model"),
    ("model", None),
    (None, "batch"),
    (None, "model"),
]
DTYPES = ["float32", "float64", "bfloat16", "float16"]

# The ids contain repetitions, the last row, and negative ids, which Keras
# counts from the end.
IDS = pairs.TOKENS[:16].copy()
IDS[:, 1] = IDS[:, 0]
IDS[0] = [-1, 15, -1, -16, 0, 15]
LABELS = pairs.LABELS[:16]


def model(dtype="float32", *, lora=False, tied=False):
    """Returns a function that returns a model with the table `e`."""

    def make():
        ids = keras.Input((6,), dtype="int32")
        layer = L.ReversibleEmbedding if tied else L.Embedding
        table = layer(16, 8, name="e", dtype=dtype)
        x = table(ids)
        if lora:
            table.enable_lora(2, b_initializer="he_uniform")
        if tied:
            x = table(L.Dense(8, name="between")(x), reverse=True)
        return keras.Model(ids, L.Dense(4, name="head")(L.Flatten()(x)))

    return make


MODELS = {
    **{dtype: model(dtype) for dtype in DTYPES},
    "mixed": model("mixed_bfloat16"),
    "lora": model(lora=True),
    "lora in bfloat16": model("bfloat16", lora=True),
    "tied": model(tied=True),
    "tied in bfloat16": model("bfloat16", tied=True),
    "tied with lora": model(lora=True, tied=True),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "accumulated": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2
    ),
}


def tolerance_of(name):
    # For a repeated id, a single device rounds the row after each addition. On
    # a mesh, the gradients of the id are summed first.
    is_low = "float16" in name
    return dict(rtol=2**-7, atol=2e-3) if is_low else pairs.TOLERANCE


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_matches_a_single_device(name, optimizer, axes):
    plain = pairs.plain(MODELS[name])
    sharded = pairs.on_mesh(MODELS[name], {"e.embeddings": axes})
    for epochs in (1, 2):
        # An epoch has two steps.
        expected, found = (
            pairs.fit(
                one,
                IDS,
                LABELS,
                optimizer=OPTIMIZERS[optimizer](),
                epochs=epochs,
            )
            for one in (plain, sharded)
        )
        pairs.assert_alike(expected, found, **tolerance_of(name))
        pairs.assert_same_weights(plain, sharded, **tolerance_of(name))
    assert axes_of(sharded.get_layer("e")._embeddings) == axes


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lookups_are_bitwise_identical_to_a_single_device(dtype, axes):
    plain = pairs.plain(model(dtype))
    sharded = pairs.on_mesh(model(dtype), {"e.embeddings": axes})
    rows = [
        np.asarray(tf.cast(one.get_layer("e")(IDS), tf.float64))
        for one in (plain, sharded)
    ]
    np.testing.assert_array_equal(*rows)
    # The last batch is smaller.
    np.testing.assert_allclose(
        *(
            one.predict(IDS[:12], batch_size=8, verbose=0)
            for one in (plain, sharded)
        ),
        rtol=1e-6,
    )


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_sums_match_tensorflow(dtype, axes):
    layout = layout_of(mesh_of(batch=2, model=4), *axes)
    table = tf.cast(tf.reshape(tf.range(64), [8, 8]), dtype)
    ids = np.array([7, 0, 0, 4, 3], np.int32)
    rows = tf.gather(table, ids)

    @tf.function(autograph=False)
    def run(table, rows, ids):
        return (
            sharded_rows.lookup(table, ids, layout),
            sharded_rows.segment_sum(rows, ids, 8, layout),
        )

    with tracing.default_mesh(layout.mesh):
        found, sums = run(
            transfer.to_mesh(table, layout),
            transfer.to_mesh(rows, layout_of(layout.mesh, None, None)),
            transfer.to_mesh(ids, layout_of(layout.mesh, None)),
        )
    assert dtensor.fetch_layout(sums) == layout
    np.testing.assert_array_equal(transfer.to_host(found), rows)
    np.testing.assert_array_equal(
        transfer.to_host(sums), tf.math.unsorted_segment_sum(rows, ids, 8)
    )


@pytest.mark.parametrize("axes", [("model", "batch"), (None, "batch")], ids=str)
@pytest.mark.parametrize(
    # The negative id is counted from the end before it is checked.
    ("invalid", "named"),
    [(16, "= 16 is not in"), (-17, "= -1 is not in")],
)
def test_out_of_range_id_raises(axes, invalid, named):
    sharded = pairs.on_mesh(model(), {"e.embeddings": axes})
    with pytest.raises(tf.errors.OpError, match=named):
        np.asarray(sharded(np.full((2, 6), invalid)))


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("axes", [("model", None), ("model", "batch")], ids=str)
@pytest.mark.parametrize(
    "make_optimizer", [keras.optimizers.SGD, keras.optimizers.Adagrad]
)
def test_batches_of_unknown_size_match_a_single_device(axes, make_optimizer):
    plain = pairs.plain(model())
    sharded = pairs.on_mesh(model(), {"e.embeddings": axes})
    mesh = sharded.get_layer("e").embeddings.mesh
    batch = IDS, LABELS
    for one in (plain, sharded):
        optimizer = make_optimizer(0.1)
        optimizer.build(one.trainable_weights)

        @tf.function(
            autograph=False,
            input_signature=[
                tf.TensorSpec([None, 6], tf.int64),
                tf.TensorSpec([None], tf.int64),
            ],
        )
        def step(x, y, one=one, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = pairs.loss()(y, one(x))
            weights = one.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)

        if one is plain:
            step(*batch)
            continue
        with tlm.layout.default_mesh(mesh, "batch"):
            step(
                transfer.to_mesh(batch[0], layout_of(mesh, "batch", None)),
                transfer.to_mesh(batch[1], layout_of(mesh, "batch")),
            )
    pairs.assert_same_weights(plain, sharded)


def operations_of(graph):
    """Returns the operations of a graph and of its conditional branches."""
    found = list(graph.get_operations())
    for op in graph.get_operations():
        if op.type in ("If", "StatelessIf"):
            for branch in ("then_branch", "else_branch"):
                function = graph._get_function(op.get_attr(branch).name)
                found += operations_of(function.graph)
    return found


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize(
    "case", compiled_lookups.CASES, ids=lambda case: case[0]
)
@pytest.mark.parametrize(
    "optimizer", ["sgd", "adam", "adadelta", "accumulated"]
)
def test_no_op_looks_up_or_sums_all_rows(case, optimizer):
    _, make, axes = case
    sharded = pairs.on_mesh(make, {"e.embeddings": axes})
    table = sharded.get_layer("e")._embeddings
    sharded.optimizer = OPTIMIZERS[optimizer]()
    sharded.optimizer.build(sharded.trainable_variables)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(sharded(x)))
        weights = sharded.trainable_weights
        sharded.optimizer.apply(tape.gradient(loss, weights), weights)

    mesh = table.mesh
    batch = transfer.to_mesh(
        compiled_lookups.IDS, layout_of(mesh, "batch", None)
    )
    with tlm.layout.default_mesh(mesh, "batch"):
        graph = step.get_concrete_function(batch).graph
    replicated = dtensor.Layout.replicated(mesh, 2).to_string()
    # Tables with unsharded rows are looked up on each device, with its columns.
    full = [
        op.name
        for op in operations_of(graph)
        if (
            op.type == "GatherV2"
            and op.inputs[0].shape == table.shape
            and axes[0] is not None
        )
        or (
            op.type == "UnsortedSegmentSum"
            and op.outputs[0].shape.is_compatible_with(table.shape)
            and axes[0] is not None
        )
        or (
            op.type == "Relayout"
            and op.outputs[0].shape == table.shape
            and op.get_attr("layout").decode() == replicated
        )
    ]
    assert full == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_compiled_steps_have_no_result_of_the_size_of_the_table(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.layout.keras3.compiled_lookups"],
        cwd=ROOT,
        env={
            **os.environ,
            **compiled_lookups.ENVIRONMENT,
            compiled_lookups.FOLDER: str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1].removeprefix("FOUND "))
    # The check must detect a table that DTensor gathers.
    assert any("AllGather" in op for op in found.pop("quantized"))
    assert found == {name: [] for name, _, _ in compiled_lookups.CASES}


def integers():
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(
        16, 8, name="e", dtype="int32", embeddings_initializer="ones"
    )(ids)
    x = L.Lambda(lambda x: tf.cast(x, tf.float32))(x)
    return keras.Model(ids, L.Dense(4)(L.Flatten()(x)))


@pytest.mark.parametrize("kind", ["int8", "int4", "integers"])
def test_gathered_tables_are_reported(kind):
    make = integers if kind == "integers" else model()
    for strict in (False, True):
        mesh = mesh_of(batch=2, model=2)
        layout_map = tlm.LayoutMap(mesh, strict=strict)
        layout_map["e.embeddings"] = layout_of(mesh, "model", None)
        with tlm.layout_map_scope(layout_map):
            one = make()
        if kind != "integers":
            one.get_layer("e").quantize(kind)
        if strict:
            with pytest.raises(
                UnsupportedByDTensorError,
                match="gather of weights in layer 'e'",
            ):
                one.predict(IDS, verbose=0)
            continue
        with pytest.warns(UserWarning, match="gather of weights in layer 'e'"):
            one.predict(IDS, verbose=0)
        (found,) = layout_map.explain(one).replicated_ops
        assert found.layer == "'e'"


def test_sharded_tables_pass_a_strict_map():
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map["e.embeddings"] = layout_of(mesh, "model", "batch")
    with tlm.layout_map_scope(layout_map):
        one = model("bfloat16", lora=True, tied=True)()
    pairs.fit(one, IDS, LABELS, epochs=1)
    assert layout_map.explain(one).replicated_ops == ()
