"""Tests `tlm.export` of Keras models on the host and on a mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tests.serving import served as helpers

tpu = tf.tpu.experimental.embedding
RNG = np.random.default_rng(3)
IDS = RNG.integers(0, 16, (8, 3))


def sharded(module=keras, layers=tlm.layers, optimizer="adagrad", **kwargs):
    """Returns a model with two embedding layers and a Dense layer."""
    ids = module.Input([3], dtype="int64", name="ids")
    first = layers.ShardedEmbedding(
        16, 4, optimizer=optimizer, name="words", **kwargs
    )(ids)
    second = layers.ShardedEmbedding(
        20, 4, optimizer=optimizer, name="other", **kwargs
    )(ids + 1)
    flat = module.layers.Flatten()(first + second)
    return module.Model(ids, module.layers.Dense(2, name="d1")(flat))


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("optimizer", ["adagrad", None])
def test_an_exported_model_matches_the_predictions(optimizer, kind, tmp_path):
    model = sharded(optimizer=optimizer, num_shards=3)
    report, served = helpers.export(model, tmp_path, kind)
    assert report.num_variables == 1
    assert [table.name for table in report.tables] == ["words", "other"]
    wanted = model(IDS)
    largest = sum(table.largest_error for table in report.tables)
    slack = 12 * largest * np.abs(model.get_layer("d1").kernel).max()
    np.testing.assert_allclose(
        served.serve(IDS), wanted, rtol=1e-5, atol=1e-6 + slack
    )
    found = served.signatures["serving_default"](ids=tf.constant(IDS))
    np.testing.assert_array_equal(found["output_0"], served.serve(IDS))
    # The tables are exported only once: the export contains the rows, but not
    # the training variables.
    assert sum(np.prod(v.shape) for v in served.variables_of_model) == 26


def test_the_signature_matches_a_keras_export(tmp_path):
    model = sharded()
    model.export(str(tmp_path / "keras"), verbose=False)
    theirs = tf.saved_model.load(str(tmp_path / "keras"))
    _, ours = helpers.export(model, tmp_path)
    for name in ("serve", "serving_default"):
        first, second = (one.signatures[name] for one in (ours, theirs))
        assert (
            first.structured_input_signature
            == second.structured_input_signature
        )
        assert first.structured_outputs == second.structured_outputs
    np.testing.assert_array_equal(ours.serve(IDS), theirs.serve(IDS))


def features(module=keras, layers=tlm.layers):
    """Returns a model with a `TPUEmbedding` and two different inputs."""
    tables = [
        helpers.table_of(
            helpers.make_rows(16, 4, seed), f"t{seed}", combiner="mean"
        )
        for seed in range(2)
    ]
    inputs = {
        "a": module.Input([3], dtype="int64", name="a"),
        "b": module.Input([None], dtype="int64", ragged=True, name="b"),
    }
    found = layers.TPUEmbedding(
        {"a": tpu.FeatureConfig(tables[0]), "b": tpu.FeatureConfig(tables[1])},
        tpu.SGD(0.1),
        name="tables",
    )(inputs)
    return module.Model(
        inputs, module.layers.Dense(2, name="d1")(found["a"] + found["b"])
    )


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_tpu_embedding_in_a_model_accepts_ragged_inputs(kind, tmp_path):
    model = features()
    inputs = {
        "a": tf.constant(IDS),
        "b": tf.ragged.constant(
            [[1, 2], [], [3]] * 2 + [[0], [15]], dtype=tf.int64
        ),
    }
    report, served = helpers.export(model, tmp_path, kind)
    assert report.num_variables == 1
    found = served.serve(inputs)
    slack = (
        sum(table.largest_error for table in report.tables)
        * 4
        * np.abs(model.get_layer("d1").kernel).max()
    )
    np.testing.assert_allclose(
        found, model(inputs), rtol=1e-5, atol=1e-6 + slack
    )
    by_name = served.signatures["serving_default"](
        a=inputs["a"],
        b_values=inputs["b"].values,
        b_row_splits=inputs["b"].row_splits,
    )
    np.testing.assert_array_equal(by_name["output_0"], found)


def test_out_of_range_ids_raise_with_the_layer_name(tmp_path):
    _, served = helpers.export(sharded(), tmp_path, "int8")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"\[0, 16\) \(layer .*words.*16"
    ):
        served.serve(np.full([1, 3], 16))


def test_a_model_with_strings_exports_its_vocabulary(tmp_path):
    words = keras.Input([2], dtype="string", name="words")
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    rows = tlm.layers.ShardedEmbedding(3, 4, name="table")(lookup(words))
    _, served = helpers.export(keras.Model(words, rows), tmp_path, "int8")
    found = served.serve(tf.constant([["b", "a"], ["?", "b"]])).numpy()
    np.testing.assert_array_equal(found[0, 0], found[1, 1])
    assert found.shape == (2, 2, 4)


class Subclassed(keras.Model):
    """Subclassed model, which Keras does not treat as functional."""

    def __init__(self):
        super().__init__()
        self.table = tlm.layers.ShardedEmbedding(16, 4, name="words")
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, ids, training=False):
        return self.dropout(self.table(ids), training=training)


def test_a_subclassed_model_is_exported_with_its_specs(tmp_path):
    model = Subclassed()
    wanted = model(IDS)
    _, served = helpers.export(
        model, tmp_path, input_signature=[tf.TensorSpec([None, None], tf.int32)]
    )
    np.testing.assert_array_equal(served.serve(IDS[:, :2]), wanted[:, :2])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_rows_are_returned_in_the_compute_dtype(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    try:
        model = sharded()
    finally:
        keras.config.set_dtype_policy("float32")
    _, served = helpers.export(model, tmp_path)
    assert served.serve(IDS).dtype == model(IDS).dtype
    np.testing.assert_allclose(
        tf.cast(served.serve(IDS), tf.float32),
        tf.cast(model(IDS), tf.float32),
        atol=2e-2,
    )


def test_tables_with_equal_names_are_named_after_their_layers(tmp_path):
    inputs = {"x": keras.Input([2], dtype="int64", name="x")}
    rows = helpers.make_rows(16, 4)
    parts = [
        tlm.layers.TPUEmbedding(
            {"x": tpu.FeatureConfig(helpers.table_of(rows, "t"))},
            tpu.SGD(0.1),
            name=name,
        )(inputs)["x"]
        for name in ("one", "two")
    ]
    report, _ = helpers.export(
        keras.Model(inputs, parts), tmp_path, {"one/t": "int8"}
    )
    assert [(table.name, table.row_format) for table in report.tables] == [
        ("one/t", "int8"),
        ("two/t", "float32"),
    ]


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize(
    ("optimizer", "axes"),
    [("adagrad", ("model", None)), (None, (None, "model"))],
)
def test_a_model_on_a_mesh_is_served_without_a_mesh(
    optimizer, axes, kind, tmp_path
):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["(words|other).embeddings"] = layout_of(mesh, *axes)
    layout_map["d1.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = sharded(optimizer=optimizer)
    report, served = helpers.export(model, tmp_path, kind)
    assert not [
        name
        for name in helpers.operations_of(served.serve)
        if "DTensor" in name or "LayoutMap" in name
    ]
    wanted = model.predict(IDS, verbose=0)
    slack = 24 * max(table.largest_error for table in report.tables)
    np.testing.assert_allclose(
        served.serve(IDS), wanted, rtol=1e-5, atol=1e-6 + slack
    )
    found = helpers.run_signature_with_graph_ops(report.path, ids=IDS)
    np.testing.assert_array_equal(found["output_0"], served.serve(IDS))


# Ways to read a table other than by calling its layer. Each function returns
# the product of `rows` with the rows of the table.
DIRECT_READS = {
    "value": lambda rows, table: tf.matmul(
        rows, table.value(), transpose_b=True
    ),
    "conversion": lambda rows, table: tf.matmul(rows, table, transpose_b=True),
    "operator": lambda rows, table: tf.matmul(
        rows, table + 0.0, transpose_b=True
    ),
    "index": lambda rows, table: tf.matmul(rows, table[:], transpose_b=True),
    "sparse_read": lambda rows, table: tf.matmul(
        rows, table.sparse_read(tf.range(16)), transpose_b=True
    ),
    "gather_rows": lambda rows, table: tf.matmul(
        rows, table.gather_rows(tf.range(16), unique=True), transpose_b=True
    ),
    "gather_nd": lambda rows, table: tf.matmul(
        rows,
        table.gather_nd(tf.range(16)[:, tf.newaxis]),
        transpose_b=True,
    ),
}


def tied_model(read, **options):
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            # Both tables are stored in one variable.
            self.first = tlm.layers.ShardedEmbedding(
                20, 4, name="first", **options
            )
            self.table = tlm.layers.ShardedEmbedding(
                16, 4, name="words", **options
            )

        def call(self, ids, training=False):
            rows = self.table(ids) + self.first(ids)
            return DIRECT_READS[read](rows, self.table.embeddings)

    model = Tied()
    model(IDS)
    return model


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("read", DIRECT_READS)
@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("optimizer", ["adagrad", None])
def test_tied_weights_are_read_from_the_stored_table(
    read, kind, num_shards, optimizer, tmp_path
):
    model = tied_model(read, num_shards=num_shards, optimizer=optimizer)
    report, served = helpers.export(
        model,
        tmp_path,
        kind,
        input_signature=[tf.TensorSpec([None, None], tf.int64)],
    )
    assert report.num_variables == 1
    # The product has the unpacked rows, as in lookups of the stored table. The
    # error of a product is therefore at most the error of one factor times the
    # other factor, for both factors.
    error = max(table.largest_error for table in report.tables)
    largest = 2 * max(
        np.abs(layer.embeddings.numpy()).max()
        for layer in (model.table, model.first)
    )
    np.testing.assert_allclose(
        served.serve(IDS),
        model(IDS),
        rtol=1e-5,
        atol=1e-6 + 4 * (2 * error * largest + largest * error + error**2),
    )
    # The rows are stored once.
    assert not served.variables_of_model
    assert (
        b"LayoutMap>"
        not in (tmp_path / "model" / "saved_model.pb").read_bytes()
    )


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_tied_weights_of_tables_on_a_mesh_are_stored_once(kind, tmp_path):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["(first|words).embeddings"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = tied_model("conversion", optimizer=None)
    report, served = helpers.export(
        model,
        tmp_path,
        kind,
        input_signature=[tf.TensorSpec([None, None], tf.int64)],
    )
    assert report.num_variables == 1
    np.testing.assert_allclose(
        served.serve(IDS),
        np.asarray(model(IDS)),
        atol=1e-6 if kind == "float32" else 0.01,
    )
    assert not served.variables_of_model


def test_direct_reads_of_other_tables_raise(tmp_path):
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = tlm.layers.ShardedEmbedding(
                tlm.vocabulary.OpenVocabulary(16),
                4,
                optimizer="sgd",
                name="words",
            )

        def call(self, ids, training=False):
            rows = self.table(ids)
            return tf.matmul(
                rows,
                tf.convert_to_tensor(self.table.embeddings),
                transpose_b=True,
            )

    model = Tied()
    model(IDS)
    with pytest.raises(ValueError, match="'words'.*other than by calling"):
        tlm.export(
            model,
            str(tmp_path / "model"),
            input_signature=[tf.TensorSpec([None, None], tf.int64)],
        )
    assert not list(tmp_path.iterdir())
