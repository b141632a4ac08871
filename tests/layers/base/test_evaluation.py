"""`evaluate` and `predict` of a `layers.TPUEmbedding`, in both Keras versions.

A call of the model outside of these methods uses TensorFlow's ops, and is the
reference.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests import strategies
from tf_layoutmap._core import ops

tpu = tf.tpu.experimental.embedding
VERSIONS = [
    pytest.param(keras, tlm.layers.TPUEmbedding, id="keras"),
    pytest.param(tf_keras, tlm.layers.tf_keras.TPUEmbedding, id="tf_keras"),
]
# One table for each kind of lookup: name, number of rows, combiner.
TABLES = [("sums", 40, "sum"), ("means", 30, "mean"), ("roots", 20, "sqrtn")]
NUM_SAMPLES = 12


@pytest.fixture(name="lookups")
def fixture_lookups(monkeypatch):
    """Returns the features of all fused lookups that are traced or run."""
    features = []
    original = ops.lookup_rows

    def lookup_rows(**arguments):
        features.append(arguments["feature"])
        return original(**arguments)

    monkeypatch.setattr(ops, "lookup_rows", lookup_rows)
    return features


def configs(**settings):
    tables = {
        name: tpu.TableConfig(
            num_rows,
            6,
            tf.random_uniform_initializer(-1.0, 1.0, seed=number),
            combiner=combiner,
            name=name,
            **settings,
        )
        for number, (name, num_rows, combiner) in enumerate(TABLES)
    }
    return {
        **{name: tpu.FeatureConfig(table) for name, table in tables.items()},
        "sequence": tpu.FeatureConfig(tables["sums"], max_sequence_length=2),
    }


def make_model(version, layer_class, features=None, dtype="int64", **options):
    features = features or configs()
    layer = layer_class(features, tpu.Adagrad(0.5), **options)
    inputs = {
        name: version.Input([3], dtype=dtype, name=name) for name in features
    }
    flat = [version.layers.Flatten()(rows) for rows in layer(inputs).values()]
    outputs = version.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    model = version.Model(inputs, outputs)
    model.compile(version.optimizers.SGD(0.5), "mse")
    return model, layer


def data(model, highest=20, seed=0):
    generator = np.random.default_rng(seed)
    inputs = {
        name: generator.integers(0, highest, [NUM_SAMPLES, 3])
        for name in model.input
    }
    targets = generator.normal(size=[NUM_SAMPLES, model.output.shape[-1]])
    return inputs, targets.astype(np.float32)


def by_stock_ops(model, inputs):
    tensors = {name: tf.constant(ids) for name, ids in inputs.items()}
    return model(tensors, training=False).numpy()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partitioner": tlm.partitioners.FixedShardsPartitioner(3)},
        {"out_of_range": "clip"},
    ],
    ids=["one shard", "three shards", "clip"],
)
def test_results_equal_those_of_tensorflow_s_ops(
    version, layer_class, options, lookups
):
    model, _ = make_model(version, layer_class, **options)
    inputs, targets = data(model, 50 if "out_of_range" in options else 20)
    model.fit(inputs, targets, batch_size=4, verbose=0)
    expected = by_stock_ops(model, inputs)
    del lookups[:]
    found = model.predict(inputs, batch_size=4, verbose=0)
    # Sequences are not sums of rows.
    assert set(lookups) == {"sums", "means", "roots"}
    np.testing.assert_array_equal(found, expected)
    del lookups[:]
    loss = model.evaluate(inputs, targets, batch_size=4, verbose=0)
    assert set(lookups) == {"sums", "means", "roots"}
    np.testing.assert_allclose(
        loss, np.mean((expected - targets) ** 2), rtol=1e-5
    )
    # Later predictions see later updates.
    model.fit(inputs, targets, batch_size=4, verbose=0)
    np.testing.assert_array_equal(
        model.predict(inputs, batch_size=4, verbose=0),
        by_stock_ops(model, inputs),
    )


def ragged_batch(seed=0):
    """Returns ragged ids and weights of `NUM_SAMPLES` samples."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 5, NUM_SAMPLES)
    ids = tf.RaggedTensor.from_row_lengths(
        tf.constant(generator.integers(0, 20, lengths.sum())), lengths
    )
    return ids, ids.with_values(
        tf.constant(generator.uniform(0.5, 2.0, lengths.sum()), tf.float32)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
@pytest.mark.parametrize("form", ["ragged", "ragged weighted", "sparse"])
def test_inputs_of_all_forms(version, layer_class, form, lookups):
    names = [name for name, _, _ in TABLES]

    class Model(version.Model):
        def __init__(self):
            super().__init__()
            features = configs()
            self.tables = layer_class(
                {name: features[name] for name in names}, tpu.Adagrad(0.5)
            )

        def call(self, inputs):
            rows = self.tables(
                dict.fromkeys(names, inputs["ids"]),
                dict.fromkeys(names, inputs["weights"])
                if "weights" in inputs
                else None,
            )
            return tf.concat(list(rows.values()), axis=1)

    ids, weights = ragged_batch()
    if form == "sparse":
        ids = ids.to_sparse()
    batch = {"ids": ids}
    if form == "ragged weighted":
        batch["weights"] = weights
    model = Model()
    model.compile("sgd", "mse")
    expected = model(batch).numpy()
    assert not lookups
    found = model.predict(tf.data.Dataset.from_tensors(batch), verbose=0)
    np.testing.assert_array_equal(found, expected)
    # The op takes row_splits; a sparse tensor has indices.
    assert set(lookups) == (set() if form == "sparse" else set(names))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (
            {
                "quantization_config": tpu.QuantizationConfig(
                    num_buckets=4, lower=-1.0, upper=1.0
                )
            },
            {},
        ),
        ({}, {"table_dtypes": "bfloat16"}),
        ({}, {"out_of_range": "drop"}),
    ],
    ids=["quantized", "bfloat16", "drop"],
)
def test_other_tables_use_tensorflow_s_ops(
    version, layer_class, settings, options, lookups
):
    model, _ = make_model(version, layer_class, configs(**settings), **options)
    inputs, _ = data(model, 30 if "out_of_range" in options else 20)
    np.testing.assert_array_equal(
        model.predict(inputs, verbose=0), by_stock_ops(model, inputs)
    )
    assert not lookups


@pytest.mark.covering(1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
@pytest.mark.parametrize("dtype", ["int64", "string"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_an_open_vocabulary_finds_its_keys(
    version, layer_class, dtype, num_shards, lookups, monkeypatch
):
    searches = []
    original = ops.find_keys
    monkeypatch.setattr(
        ops,
        "find_keys",
        lambda **arguments: searches.append(1) or original(**arguments),
    )
    table = tpu.TableConfig(50, 4, combiner="mean", name="words")
    model, layer = make_model(
        version,
        layer_class,
        {"words": tpu.FeatureConfig(table)},
        dtype,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(50)},
    )
    inputs, targets = data(model, 1000)
    others, _ = data(model, 1000, seed=1)
    num_keys = len(np.unique(inputs["words"]))
    known, others = (
        {
            "words": tf.constant(
                batch["words"].astype(str if dtype == "string" else dtype)
            )
        }
        for batch in (inputs, others)
    )
    model.fit(known, targets, batch_size=6, verbose=0)
    for batch in (known, others):
        np.testing.assert_array_equal(
            model.predict(batch, verbose=0), by_stock_ops(model, batch)
        )
    assert set(lookups) == {"words"}
    assert searches
    stats = layer.embedding.vocabularies["words"].stats()
    assert stats["num_keys"] == num_keys


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("version", "layer_class"),
    [
        pytest.param(keras, tlm.layers.ShardedEmbedding, id="keras"),
        pytest.param(
            tf_keras, tlm.layers.tf_keras.ShardedEmbedding, id="tf_keras"
        ),
    ],
)
@pytest.mark.parametrize("mask_zero", [False, True])
def test_one_table_with_an_open_vocabulary(
    version, layer_class, mask_zero, lookups
):
    layer = layer_class(
        tlm.vocabulary.OpenVocabulary(50),
        4,
        optimizer=tpu.Adagrad(0.5),
        mask_zero=mask_zero,
    )
    inputs = version.Input([3], dtype="int64", name="words")
    model = version.Model({"words": inputs}, layer(inputs))
    model.compile("sgd", "mse")
    known, _ = data(model, 1000)
    others, _ = data(model, 1000, seed=1)
    known["words"][:, 0] = others["words"][:, 0] = 0
    model.fit(known, np.ones([NUM_SAMPLES, 3, 4]), batch_size=6, verbose=0)
    num_keys = layer.vocabulary.stats()["num_keys"]
    del lookups[:]
    for batch in (known, others):
        np.testing.assert_array_equal(
            model.predict(batch, verbose=0), by_stock_ops(model, batch)
        )
    assert lookups
    assert layer.vocabulary.stats()["num_keys"] == num_keys


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_an_id_outside_of_its_table_is_named(version, layer_class):
    model, _ = make_model(version, layer_class)
    inputs, targets = data(model)
    inputs["roots"][5, 1] = 20
    for run in (
        lambda: model.predict(inputs, verbose=0),
        lambda: model.evaluate(inputs, targets, verbose=0),
    ):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="'roots', sample 5: id 20"
        ):
            run()


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_replicas_predict_what_one_device_predicts(
    version, layer_class, lookups
):
    with strategies.mirrored(2).scope():
        model, _ = make_model(version, layer_class)
    inputs, targets = data(model)
    model.fit(inputs, targets, batch_size=6, verbose=0)
    del lookups[:]
    found = model.predict(inputs, batch_size=6, verbose=0)
    assert len(lookups) >= 6
    np.testing.assert_array_equal(found, by_stock_ops(model, inputs))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"steps_per_execution": 2}], ids=str
)
def test_other_ways_to_run_the_steps(version, layer_class, options, lookups):
    model, _ = make_model(version, layer_class)
    model.compile("sgd", "mse", **options)
    inputs, targets = data(model)
    expected = by_stock_ops(model, inputs)
    np.testing.assert_array_equal(
        model.predict(inputs, batch_size=4, verbose=0), expected
    )
    loss = model.evaluate(inputs, targets, batch_size=4, verbose=0)
    np.testing.assert_allclose(
        loss, np.mean((expected - targets) ** 2), rtol=1e-5
    )
    assert lookups


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_single_batches(version, layer_class, lookups):
    model, _ = make_model(version, layer_class)
    inputs, targets = data(model)
    expected = by_stock_ops(model, inputs)
    np.testing.assert_array_equal(model.predict_on_batch(inputs), expected)
    loss = model.test_on_batch(inputs, targets)
    np.testing.assert_allclose(
        loss, np.mean((expected - targets) ** 2), rtol=1e-5
    )
    assert lookups


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_exports_after_a_prediction_contain_only_tensorflow_s_ops(
    version, layer_class, tmp_path
):
    class Model(version.Model):
        def __init__(self):
            super().__init__()
            features = configs()
            self.tables = layer_class(
                {"sums": features["sums"]}, tpu.Adagrad(0.5)
            )

        # The traces of this function are kept.
        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
        def look_up(self, ids):
            return self.tables({"sums": ids})["sums"]

        def call(self, ids):
            return self.look_up(tf.cast(ids, tf.int64))

    model = Model()
    model.compile("sgd", "mse")
    ids = np.random.default_rng(0).integers(0, 40, [NUM_SAMPLES, 3])
    expected = model(tf.constant(ids)).numpy()
    np.testing.assert_array_equal(model.predict(ids, verbose=0), expected)
    predict = tf.function(
        model.predict_step,
        input_signature=[tf.TensorSpec([None, 3], tf.int64)],
    )
    holder = tf.Module()
    holder.model, holder.predict = model, predict
    for name, subject in (("model", model), ("module", holder)):
        path = str(tmp_path / name)
        tf.saved_model.save(subject, path)
        assert b"LayoutMap>" not in (
            (tmp_path / name / "saved_model.pb").read_bytes()
        )
    loaded = tf.saved_model.load(str(tmp_path / "module"))
    np.testing.assert_array_equal(loaded.predict(tf.constant(ids)), expected)


def test_weights_of_ids_have_gradients_in_a_test_step(lookups):
    """A test step may compute gradients of its inputs."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            features = configs()
            self.tables = tlm.layers.TPUEmbedding(
                {"sums": features["sums"]}, tpu.Adagrad(0.5)
            )
            self.tables.trainable = False

        def call(self, inputs):
            return self.tables(
                {"sums": inputs["ids"]}, {"sums": inputs["weights"]}
            )["sums"]

        def sensitivity(self, data):
            weights = data["weights"]
            with tf.GradientTape() as tape:
                tape.watch(weights.values)
                outputs = self(data | {"weights": weights})
            return tape.gradient(outputs, weights.values)

        def predict_step(self, data):
            return self.sensitivity(data)[tf.newaxis]

    ids, weights = ragged_batch()
    batch = {"ids": ids, "weights": weights}
    model = Model()
    model(batch)
    expected = model.sensitivity(batch).numpy()
    found = model.predict(tf.data.Dataset.from_tensors(batch), verbose=0)
    assert lookups
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
