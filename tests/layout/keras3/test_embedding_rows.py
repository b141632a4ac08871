"""Checks that a row-sharded Keras `Embedding` matches a single device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.keras3.test_agreement import EXPLORE
from tests.layout.meshes import axes_of, mesh_of
from tf_layoutmap._core import dtensor_ops, patches
from tf_layoutmap.layout.keras3 import embedding_rows
from tf_layoutmap.layout.mesh import tracing, transfer

dtensor = tf.experimental.dtensor
ROWS = ("model", None)
# The ids contain repetitions and one negative id, which Keras counts from the
# end.
IDS = pairs.TOKENS.copy()
IDS[:, 1] = IDS[:, 0]
IDS[0, 0] = -1


def model():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(16, 8, name="e"),
            keras.layers.Flatten(),
            keras.layers.Dense(4, name="head"),
        ]
    )


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    "sizes", [dict(batch=2, model=2), dict(batch=1, model=4)]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(0.01),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_training_matches_a_single_device(sizes, make):
    trained = pairs.assert_trains_alike(
        model,
        IDS,
        {"e.embeddings": ROWS},
        mesh=mesh_of(**sizes),
        optimizer=make,
    )
    assert axes_of(trained.get_layer("e").embeddings) == ROWS
    pairs.assert_slots_have_layouts_of_weights(trained)


@pytest.mark.exhaustive
@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("axes", [("model", "batch"), (None, "batch")])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(0.01),
    ],
    ids=["adagrad", "adam"],
)
def test_repeated_ids_train_a_table_sharded_over_the_batch_axis(axes, make):
    # For a repeated row, Keras squares the gradient of each occurrence
    # separately.
    trained = pairs.assert_trains_alike(
        model, IDS, {"e.embeddings": axes}, optimizer=make
    )
    assert axes_of(trained.get_layer("e").embeddings) == axes


def test_tied_table_trains_as_on_a_single_device():
    def tied():
        ids = keras.Input((6,), dtype="int32")
        table = keras.layers.ReversibleEmbedding(16, 8, name="e")
        x = keras.layers.Flatten()(table(table(ids), reverse=True))
        return keras.Model(ids, keras.layers.Dense(4, name="head")(x))

    pairs.assert_trains_alike(tied, IDS, {"e.embeddings": ("batch", "model")})


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(0.01),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_losses_of_many_steps_match_a_single_device(make):
    epochs = 50 if EXPLORE else 15  # An epoch has 4 steps.
    losses = [
        pairs.fit(one, IDS, optimizer=make(), epochs=epochs)["loss"]
        for one in (
            pairs.plain(model),
            pairs.on_mesh(model, {"e.embeddings": ROWS}),
        )
    ]
    np.testing.assert_allclose(*losses, **pairs.TOLERANCE)


@pytest.mark.parametrize(
    "make", [keras.optimizers.SGD, keras.optimizers.Adagrad]
)
def test_no_op_of_a_step_has_the_size_of_the_table(make):
    num_rows = 4096

    def big():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(num_rows, 8, name="e"),
                keras.layers.Flatten(),
                keras.layers.Dense(4, name="head"),
            ]
        )

    mesh_model = pairs.on_mesh(big, {"e.embeddings": ROWS})
    mesh_model.compile(make(0.1), pairs.loss())
    mesh_model.optimizer.build(mesh_model.trainable_variables)
    table, slots = (
        mesh_model.get_layer("e").embeddings,
        len(mesh_model.optimizer.variables),
    )

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = pairs.loss()(y, mesh_model(x))
        weights = mesh_model.trainable_weights
        mesh_model.optimizer.apply(tape.gradient(loss, weights), weights)

    batch = [
        transfer.to_mesh(v[:8], dtensor.Layout.replicated(table.mesh, v.ndim))
        for v in (IDS, pairs.LABELS)
    ]
    with tracing.default_mesh(table.mesh):
        graph = step.get_concrete_function(*batch).graph
    large = [
        op.name
        for op in graph.get_operations()
        for out in op.outputs
        if out.dtype != tf.resource
        and out.shape.rank
        and (out.shape.num_elements() or 0) >= num_rows
    ]
    assert slots >= 2 and large == []


def test_lookup_and_sgd_use_the_row_kernels(monkeypatch):
    calls = []

    def record(verb):
        original = getattr(dtensor_ops, verb)

        def recorded(*args, **kwargs):
            calls.append(verb)
            return original(*args, **kwargs)

        monkeypatch.setattr(dtensor_ops, verb, recorded)

    record("lookup_rows")
    record("update_rows")
    mesh_model = pairs.on_mesh(model, {"e.embeddings": ROWS})
    pairs.fit(mesh_model, IDS, optimizer=keras.optimizers.SGD(0.1), epochs=1)
    assert set(calls) == {"lookup_rows", "update_rows"}


def test_column_sharded_tables_use_dtensor():
    mesh_model = pairs.on_mesh(model, {"e.embeddings": (None, "model")})
    assert embedding_rows.axis_of(mesh_model.get_layer("e").embeddings) is None
    mesh_model = pairs.on_mesh(model, {"e.embeddings": ROWS})
    assert (
        embedding_rows.axis_of(mesh_model.get_layer("e").embeddings) == "model"
    )


def test_out_of_range_id_raises():
    mesh_model = pairs.on_mesh(model, {"e.embeddings": ROWS})
    with pytest.raises(tf.errors.OpError):
        np.asarray(mesh_model(np.full((2, 6), 16)))


def test_embedding_without_a_mesh_is_unchanged():
    patches.ensure("mesh")
    patches.ensure("keras3")
    layer = keras.layers.Embedding(4, 2)
    np.testing.assert_array_equal(
        layer(np.array([[3, -1]]))[0, 0], layer.embeddings.numpy()[3]
    )
