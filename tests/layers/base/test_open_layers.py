"""Tests `ShardedEmbedding` with an open vocabulary, in both Keras versions."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.strategies import mirrored

tpu = tf.tpu.experimental.embedding
VERSIONS = [(keras, tlm.layers), (tf_keras, tlm.layers.tf_keras)]
both = pytest.mark.parametrize(("version", "layers"), VERSIONS)
LENGTH = 3


def layer_of(
    layers,
    num_shards=2,
    optimizer=None,
    capacity=100,
    mask=False,
    initializer="uniform",
    name="words",
    **settings,
):
    return layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(capacity, **settings),
        4,
        num_shards=num_shards,
        optimizer=tpu.Adagrad(0.5) if optimizer is None else optimizer,
        embeddings_initializer=initializer,
        mask_zero=mask,
        name=name,
    )


def model_of(version, layers, dtype="string", **settings):
    layer = layer_of(layers, **settings)
    inputs = version.Input([LENGTH], dtype=dtype)
    rows = version.layers.Flatten()(layer(inputs))
    outputs = version.layers.Dense(1, kernel_initializer="ones")(rows)
    model = version.Model(inputs, outputs)
    model.compile(version.optimizers.SGD(0.01), "mse")
    return model, layer


def data(most=40, seed=0, dtype=str):
    words = np.random.default_rng(seed).integers(0, most, [64, LENGTH])
    return (
        tf.constant(words.astype(dtype)),
        tf.constant(words.sum(1, keepdims=True) / most, tf.float32),
    )


def rows_by_key(layer):
    keys = np.sort(layer.vocabulary.keys().numpy())
    return keys, tf.gather(
        layer.embeddings, layer.vocabulary.lookup(keys)
    ).numpy()


@pytest.mark.exhaustive
@both
@pytest.mark.parametrize("kind", ["open", "closed", "tpu"])
def test_a_subclassed_model_with_two_tables_is_saved_and_loaded(
    version, layers, kind, tmp_path
):
    """Keras builds a loaded model by calling it with floats instead of ids."""

    def table(name):
        if kind == "tpu":
            return layers.TPUEmbedding(
                tpu.FeatureConfig(tpu.TableConfig(100, 1, name=name)),
                tpu.Adagrad(0.5),
                name=name,
                vocabularies={name: tlm.vocabulary.OpenVocabulary(100)},
            )
        # The largest ids cannot be represented exactly in float32.
        rows = (
            tlm.vocabulary.OpenVocabulary(100) if kind == "open" else 2**24 + 3
        )
        return layers.ShardedEmbedding(
            rows,
            1,
            optimizer=tpu.Adagrad(0.5),
            name=name,
            embeddings_initializer="ones" if kind == "closed" else "uniform",
        )

    class Pair(version.Model):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.first, self.second = table("first"), table("second")
            self.top = version.layers.Dense(1)

        def call(self, ids):
            return self.top(
                tf.reshape(
                    self.first(ids[:, :1]) + self.second(ids[:, 1:]), [-1, 1]
                )
            )

    model = Pair()
    model.compile("sgd", "mse")
    ids, labels = np.arange(20).reshape(10, 2), np.ones([10, 1])
    model.fit(ids, labels, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    again = version.models.load_model(path, custom_objects={"Pair": Pair})
    for _ in range(2):
        np.testing.assert_array_equal(
            again.predict(ids, verbose=0), model.predict(ids, verbose=0)
        )
        for one in (model, again):
            one.fit(ids, labels, verbose=0, shuffle=False)


@pytest.mark.covering(1, 1)
@both
@pytest.mark.parametrize("dtype", [str, np.int64])
def test_only_fit_inserts_keys(version, layers, dtype):
    model, layer = model_of(
        version, layers, "string" if dtype is str else "int64"
    )
    inputs, labels = data(dtype=dtype)
    before = model.evaluate(inputs, labels, verbose=0)
    assert layer.vocabulary.stats()["step"] == 0
    model.fit(inputs, labels, batch_size=16, epochs=8, verbose=0)
    stats = layer.vocabulary.stats()
    assert (stats["num_keys"], stats["step"]) == (len(np.unique(inputs)), 32)
    assert int(layer.optimizer.iterations) == 32
    assert model.evaluate(inputs, labels, verbose=0) < before / 2
    others, _ = data(seed=5, most=90, dtype=dtype)
    model.predict(others, verbose=0)
    layer(others)
    tf.function(layer)(others)
    assert layer.vocabulary.stats() == stats
    known = layer.vocabulary.contains(others).numpy()
    assert known.any() and not known.all()
    rows = layer(others).numpy()
    assert not rows[~known].any() and rows[known].any(1).all()
    assert layer.vocabulary.evict(others[:1]).shape[0] == known[0].sum()


@both
def test_steps_equal_those_of_a_tpu_embedding(version, layers):
    """The values are integers, so sums do not depend on their order."""
    layer = layer_of(layers, optimizer=tpu.SGD(0.5), initializer="zeros")
    layer.build(None)
    table = tpu.TableConfig(100, 4, tf.zeros_initializer(), combiner="sum")
    other = tlm.TPUEmbedding(
        tpu.FeatureConfig(table),
        tpu.SGD(0.5),
        vocabularies={"table_0": tlm.vocabulary.OpenVocabulary(100)},
    )
    model_optimizer = version.optimizers.SGD(1.0)
    rng = np.random.default_rng(3)
    for _ in range(5):
        keys = rng.integers(-50, 50, [8, LENGTH])
        gradient = rng.integers(-4, 5, [8, LENGTH, 4]).astype(np.float32)
        with tf.GradientTape() as tape:
            # Each step calls the layer with all ids and again with some of the
            # ids.
            loss = tf.reduce_sum(layer(keys) * gradient) + tf.reduce_sum(
                layer(keys[:2]) * gradient[:2]
            )
        weights = layer.trainable_variables
        model_optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights)
        )
        other.enqueue(tf.constant(keys.ravel()))
        other.dequeue()
        gradient[:2] *= 2
        other.apply_gradients(tf.constant(gradient.reshape(-1, 4)))
    keys, rows = rows_by_key(layer)
    vocabulary = other.vocabularies["table_0"]
    np.testing.assert_array_equal(keys, np.sort(vocabulary.keys()))
    np.testing.assert_array_equal(
        rows, tf.gather(other.embedding_tables[table], vocabulary.lookup(keys))
    )


@pytest.mark.covering(1, 1)
@both
def test_saved_keys_load_into_any_number_of_shards(tmp_path, version, layers):
    model, layer = model_of(version, layers, num_shards=3)
    inputs, labels = data()
    model.fit(inputs, labels, batch_size=16, verbose=0, shuffle=False)
    found = model.predict(inputs, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    saved = tf.train.Checkpoint(model=model).save(str(tmp_path / "model"))
    loaded = version.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("words").num_shards == 3
    weights, _ = model_of(version, layers, num_shards=1)
    weights.load_weights(tmp_path / "model.weights.h5")
    restored, _ = model_of(version, layers, num_shards=5, name="others")
    restored.optimizer.build(restored.trainable_variables)
    tf.train.Checkpoint(model=restored).restore(
        saved
    ).assert_existing_objects_matched()
    for one in (loaded, weights, restored):
        np.testing.assert_array_equal(one.predict(inputs, verbose=0), found)
    # All models continue training in the same way as the saved model.
    # `restored` is excluded, because a layer with a different name initializes
    # new keys differently.
    more = data(seed=7, most=60)
    for one in (model, loaded, weights):
        one.fit(*more, batch_size=16, verbose=0, shuffle=False)
    for one in (loaded, weights):
        np.testing.assert_array_equal(
            one.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
        )
        other = one.get_layer("words")
        assert other.vocabulary.stats() == layer.vocabulary.stats()
        np.testing.assert_array_equal(
            tf.convert_to_tensor(other.optimizer.slots["accumulators"]),
            tf.convert_to_tensor(layer.optimizer.slots["accumulators"]),
        )
        assert int(other.optimizer.iterations) == 8


@pytest.mark.covering(1, 1)
@both
@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("capacity", [3000, 16])
def test_saved_keys_load_into_another_capacity(
    tmp_path, version, layers, name, capacity
):
    model, layer = model_of(version, layers, num_shards=3)
    model.fit(*data(), batch_size=16, verbose=0, shuffle=False)
    path = str(tmp_path / name)
    (model.save if name == "model.keras" else model.save_weights)(path)
    other, loaded = model_of(version, layers, num_shards=2, capacity=capacity)
    if capacity == 16:
        with pytest.warns(UserWarning, match="'words' has no rows for"):
            other.load_weights(path)
    else:
        other.load_weights(path)
    words = np.unique(data()[0])
    # `resize` keeps the same keys as a conversion of the file.
    found = layer.vocabulary.resize(capacity)
    assert (found.num_dropped > 0) == (capacity == 16)
    known = layer.vocabulary.contains(words).numpy()
    np.testing.assert_array_equal(loaded.vocabulary.contains(words), known)
    assert known.sum() == found.num_kept
    np.testing.assert_array_equal(
        loaded(tf.constant(words[known])), layer(tf.constant(words[known]))
    )
    for one in (loaded, layer):
        assert one.vocabulary.settings.capacity == capacity
    other.fit(*data(seed=3), batch_size=16, verbose=0)


@both
def test_loading_a_table_of_the_other_kind_raises(tmp_path, version, layers):
    def save(input_dim, name):
        layer = layers.ShardedEmbedding(
            input_dim, 4, optimizer="sgd", name="words"
        )
        inputs = version.Input([LENGTH], dtype="int64")
        model = version.Model(inputs, layer(inputs))
        model.save_weights(tmp_path / f"{name}.weights.h5")
        return model

    closed, opened = (
        save(113, "closed"),
        save(tlm.vocabulary.OpenVocabulary(100), "open"),
    )
    with pytest.raises(ValueError, match="a table without keys"):
        opened.load_weights(tmp_path / "closed.weights.h5")
    with pytest.raises(ValueError, match="must be one table"):
        closed.load_weights(tmp_path / "open.weights.h5")


@pytest.mark.exhaustive
@both
def test_exported_models_look_keys_up_with_stock_ops(tmp_path, version, layers):
    model, _ = model_of(
        version, layers, oov_embedding="trainable", num_shards=3
    )
    model.fit(*data(), batch_size=16, verbose=0)
    asked, _ = data(seed=5, most=90)
    expected = model.predict(asked, verbose=0)
    folders = [str(tmp_path / name) for name in ("keras", "tlm", "tf")]
    model.export(folders[0], **({"verbose": False} if version is keras else {}))
    tlm.export(model, folders[1])
    if version is tf_keras:
        tf.saved_model.save(model, folders[2])
    else:
        del folders[2]
    for folder in folders:
        served = tf.saved_model.load(folder).signatures["serving_default"]
        (found,) = served(asked).values()
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        graph = pathlib.Path(folder, "saved_model.pb").read_bytes()
        assert b"LayoutMap>" not in graph


@pytest.mark.covering(1, 1)
@both
def test_the_padding_value_is_not_a_key(version, layers):
    layer = layer_of(layers, mask=True, optimizer=tpu.SGD(1.0))
    inputs = version.Input([LENGTH], dtype="string")
    outputs = version.layers.LSTM(2)(layer(inputs))
    model = version.Model(inputs, outputs)
    model.compile("sgd", "mse")
    words = tf.constant([["a", "b", ""], ["c", "", ""]])
    model.fit(words, np.ones([2, 2], np.float32), verbose=0)
    stats = layer.vocabulary.stats()
    assert (stats["num_keys"], stats["num_lookups"]) == (3, 3)
    assert not layer.vocabulary.contains("").numpy()
    assert not layer(words).numpy()[1, 1:].any()
    # Only rows without masked positions are compared.
    np.testing.assert_array_equal(
        model.predict(words, verbose=0)[1:],
        model.predict(tf.constant([["c", "", ""]]), verbose=0),
    )
    numbers = layer_of(layers, mask=True)
    np.testing.assert_array_equal(
        numbers.compute_mask(tf.constant([[0, 5]])), [[False, True]]
    )


@both
def test_two_tables_look_ragged_ids_up(version, layers):
    first = layer_of(layers, name="first")
    second = layer_of(layers, name="second")
    words = tf.ragged.constant([["a", "b"], [], ["b"]])
    for one in (first, second):
        one.build(None)
    optimizer = version.optimizers.SGD(0.1)
    with tf.GradientTape() as tape:
        rows = first(words)
        assert rows.shape == [3, None, 4]
        loss = tf.reduce_sum(rows) + tf.reduce_sum(second(tf.constant(["c"])))
    weights = first.trainable_variables + second.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    assert first.vocabulary.contains(["a", "b", "c"]).numpy().tolist() == [
        True,
        True,
        False,
    ]
    assert second.vocabulary.contains(["a", "b", "c"]).numpy().tolist() == [
        False,
        False,
        True,
    ]


@both
def test_two_layers_have_different_initial_values(version, layers):
    del version
    found = []
    for name in ("first", "second", "first"):
        layer = layer_of(layers, name=name)
        layer.build(None)
        with tf.GradientTape():
            found.append(layer(tf.constant([7, 8])).numpy())
    assert (found[0] != found[1]).all() and (found[0] == found[2]).all()


@both
def test_the_learning_rate_can_be_set_and_scheduled(version, layers):
    def step(layer, optimizer):
        """Returns the change of a row after one step with gradient 1."""
        before = layer(tf.constant([5])).numpy()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([5])))
        weights = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return (layer(tf.constant([5])).numpy() - before).ravel()[0]

    layer = layer_of(layers, optimizer="sgd", initializer="zeros")
    layer.build(None)
    optimizer = version.optimizers.SGD(1.0)
    layer.optimizer.learning_rate = 0.5
    assert step(layer, optimizer) == -0.5
    layer.optimizer.learning_rate = 0.25
    assert step(layer, optimizer) == -0.25
    schedule = version.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [1.0, 0.5, 0.125]
    )
    layer = layer_of(layers, optimizer=tpu.SGD(schedule), initializer="zeros")
    layer.build(None)
    optimizer = version.optimizers.SGD(1.0)
    assert [step(layer, optimizer) for _ in range(3)] == [-1, -0.5, -0.125]


@both
def test_frozen_layers_insert_no_keys(version, layers):
    model, layer = model_of(version, layers)
    layer.trainable = False
    model.compile("sgd", "mse")
    model.fit(*data(), verbose=0)
    assert layer.vocabulary.stats()["step"] == 0


@both
def test_unsupported_arguments_raise_with_an_open_vocabulary(version, layers):
    words = tlm.vocabulary.OpenVocabulary(100)
    with pytest.raises(ValueError, match="`optimizer` must be given: if a row"):
        layers.ShardedEmbedding(words, 4)
    for name in ("embeddings_regularizer", "embeddings_constraint"):
        value = {
            "embeddings_regularizer": "l2",
            "embeddings_constraint": version.constraints.MaxNorm(axis=1),
        }
        with pytest.raises(ValueError, match=f"`{name}` must be None"):
            layers.ShardedEmbedding(
                words, 4, optimizer="sgd", **{name: value[name]}
            )
    with pytest.raises(ValueError, match="values for single keys.*'words'"):
        layers.ShardedEmbedding(
            words,
            4,
            optimizer="sgd",
            name="words",
            embeddings_initializer="glorot_uniform",
        )
    assert layers.ShardedEmbedding(9, 4).vocabulary is None


@both
def test_sparse_ids_equal_padded_ids(version, layers):
    """The gradients are integers, so sums do not depend on their order."""
    ragged = tf.ragged.constant([["a", "b"], [], ["c", "", "b"], ["a"]])
    shape = [4, LENGTH]
    sparse = ragged.to_sparse()
    sparse = tf.SparseTensor(sparse.indices, sparse.values, shape)
    gradient = np.arange(4 * LENGTH * 4).reshape(4, LENGTH, 4) % 7.0
    for kind in ("open", "closed", "masked"):
        found = []
        for ids in (ragged, sparse):
            if kind == "closed":
                layer = layers.ShardedEmbedding(
                    200,
                    4,
                    optimizer=tpu.SGD(0.5),
                    embeddings_initializer=version.initializers.RandomUniform(
                        seed=1
                    ),
                    name="words",
                )
                is_sparse = isinstance(ids, tf.SparseTensor)
                values = tf.cast(
                    tf.strings.to_hash_bucket_fast(
                        ids.values if is_sparse else ids.flat_values, 200
                    ),
                    tf.int64,
                )
                ids = (
                    tf.SparseTensor(ids.indices, values, ids.dense_shape)
                    if is_sparse
                    else ids.with_flat_values(values)
                )
            else:
                layer = layer_of(
                    layers, optimizer=tpu.SGD(0.5), mask=kind == "masked"
                )
                if kind == "masked" and isinstance(ids, tf.RaggedTensor):
                    ids = ids.to_tensor("", shape=shape)
            layer.build(None)
            optimizer = version.optimizers.SGD(1.0)
            for _ in range(2):
                with tf.GradientTape() as tape:
                    rows = layer(ids)
                    if isinstance(rows, tf.RaggedTensor):
                        rows = rows.to_tensor(shape=[*shape, 4])
                    loss = tf.reduce_sum(rows * gradient)
                weights = layer.trainable_variables
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, weights), weights)
                )
                found.append(rows.numpy())
            found.append(tf.convert_to_tensor(layer.embeddings).numpy())
        for one, other in zip(found[:3], found[3:], strict=True):
            np.testing.assert_array_equal(one, other)
        assert not found[3][1].any() and found[3][0, 0].any()


@pytest.mark.covering(1, 2)
@both
@pytest.mark.parametrize("dtype", ["string", "int64"])
@pytest.mark.parametrize("mask", [False, True])
def test_a_model_with_a_sparse_input_trains_and_is_exported(
    tmp_path, version, layers, dtype, mask
):
    words = tf.ragged.constant([["1", "2"], [], ["3", "4", "5"], ["1"]])
    if dtype == "int64":
        words = tf.ragged.map_flat_values(
            lambda one: tf.strings.to_number(one, tf.int64), words
        )
    ids = words.to_sparse()
    ids = tf.SparseTensor(ids.indices, ids.values, [4, LENGTH])
    layer = layer_of(layers, mask=mask)
    inputs = version.Input([LENGTH], dtype=dtype, sparse=True)
    rows = layer(inputs)
    assert tuple(rows.shape) == (None, LENGTH, 4)
    pooled = version.layers.GlobalAveragePooling1D()(rows)
    model = version.Model(inputs, version.layers.Dense(1)(pooled))
    model.compile("sgd", "mse")
    labels = np.ones([4, 1], np.float32)
    batches = tf.data.Dataset.from_tensors((ids, labels))
    model.fit(batches, epochs=2, verbose=0)
    stats = layer.vocabulary.stats()
    assert (stats["num_keys"], stats["num_lookups"]) == (5, 12)
    found = model.predict(batches, verbose=0)
    mean = tf.reduce_sum(layer(ids), 1)
    sizes = words.row_lengths() if mask else LENGTH
    mean = tf.math.divide_no_nan(
        mean, tf.cast(tf.broadcast_to(sizes, [4]), tf.float32)[:, tf.newaxis]
    )
    np.testing.assert_allclose(
        np.delete(found, 1, 0) if mask else found,
        np.delete(model.layers[-1](mean), 1, 0)
        if mask
        else model.layers[-1](mean),
        rtol=1e-5,
        atol=1e-7,
    )
    if mask:
        np.testing.assert_array_equal(
            layer.compute_mask(ids),
            tf.sequence_mask(words.row_lengths(), LENGTH),
        )
    model.save(tmp_path / "model.keras")
    loaded = version.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(batches, verbose=0), found)


@pytest.mark.covering(1, 8)
@both
@pytest.mark.parametrize(
    ("indices", "match"),
    [
        ([[0, 0], [0, 0]], "row-major order"),
        ([[1, 0], [0, 2]], "row-major order"),
        ([[0, 0], [0, 3]], "inside its shape"),
        ([[-1, 0], [0, 2]], "inside its shape"),
    ],
)
@pytest.mark.parametrize("rows", [5, tlm.vocabulary.OpenVocabulary(5)])
def test_invalid_sparse_indices_raise(version, layers, indices, match, rows):
    del version
    layer = layers.ShardedEmbedding(rows, 2, optimizer="sgd", name="words")
    ids = tf.SparseTensor(indices, [1, 2], [2, 3])
    for call in (layer, tf.function(layer)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            call(ids)


@both
def test_invalid_inputs_raise_with_an_open_vocabulary(version, layers):
    del version
    layer = layer_of(layers)
    for read in ("embeddings", "vocabulary"):
        with pytest.raises(AttributeError, match="call the layer, or `build`"):
            getattr(layer, read)
    layer.build(None)
    for value in (np.ones([2], np.float32), np.ones([2], np.uint64)):
        with pytest.raises(TypeError, match="integers that fit in int64, or"):
            layer(value)
    with tf.GradientTape():
        layer(tf.constant(["a"]))
    stats = layer.vocabulary.stats()
    refusal = "table 'words/embeddings' must be strings, as those before"
    with (
        tf.GradientTape(),
        pytest.raises(tf.errors.InvalidArgumentError, match=refusal),
    ):
        layer(tf.constant([5]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=refusal):
        layer(tf.constant([5]))
    assert layer.vocabulary.stats() == stats


@pytest.mark.exhaustive
@both
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_early_stopping_restores_the_best_table(version, layers, num_replicas):
    class Copies(version.callbacks.Callback):
        """Stores the table after each epoch."""

        def on_epoch_end(self, epoch, logs=None):
            found.append(state_of(layer))

    found = []
    with mirrored(num_replicas).scope():
        model, layer = model_of(version, layers, ttl_steps=3)
    best = version.callbacks.EarlyStopping(
        # The loss decreases, so the first epoch is the best epoch.
        "loss",
        patience=2,
        mode="max",
        restore_best_weights=True,
    )
    inputs, labels = data()
    model.fit(
        inputs,
        labels,
        batch_size=16,
        epochs=9,
        verbose=0,
        shuffle=False,
        callbacks=[Copies(), best],
    )
    assert len(found) == 3
    first, _, last = found
    assert not np.array_equal(first["rows"], last["rows"])
    restored = state_of(layer)
    assert restored.keys() == first.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(restored[name], value, err_msg=name)
    # Training continues from the restored table.
    model.fit(inputs, labels, batch_size=16, verbose=0, shuffle=False)
    np.testing.assert_array_equal(state_of(layer)["keys"], found[1]["keys"])


def state_of(layer):
    """Returns the keys, rows and slot variables of a layer."""
    return {
        "keys": layer.vocabulary.keys().numpy(),
        "rows": tf.convert_to_tensor(layer.embeddings).numpy(),
        **{
            name: tf.convert_to_tensor(slot).numpy()
            for name, slot in layer.optimizer.slots.items()
        },
    }


@both
def test_weights_of_another_model_include_its_table(version, layers):
    model, layer = model_of(version, layers, num_shards=3)
    model.fit(*data(), verbose=0)
    other, loaded = model_of(version, layers)
    other.set_weights(model.get_weights())
    for name, value in state_of(layer).items():
        np.testing.assert_array_equal(state_of(loaded)[name], value)


@both
def test_setting_weights_without_the_vocabulary_raises(version, layers):
    """Without this error, callbacks would restore weights but not tables."""
    model, _ = model_of(version, layers)
    copies = [np.array(one) for one in model.get_weights()]
    with pytest.raises(
        RuntimeError, match="'words', whose tables are not Keras weights"
    ):
        model.set_weights(copies)


@pytest.mark.exhaustive
@both
@pytest.mark.parametrize("dtype", [str, np.int64])
def test_two_replicas_train_the_same_table_as_one(version, layers, dtype):
    """The gradients are integers, so sums do not depend on their order."""
    found = []
    inputs, _ = data(dtype=dtype)
    labels = np.random.default_rng(1).integers(-4, 5, [64, LENGTH * 4])
    evaluated = []
    for num_replicas in (1, 2):
        with mirrored(num_replicas).scope():
            layer = layer_of(layers)
            ids = version.Input(
                [LENGTH], dtype="string" if dtype is str else "int64"
            )
            model = version.Model(ids, version.layers.Flatten()(layer(ids)))
            model.compile(version.optimizers.SGD(0.01), product_of(version)())
        batches = tf.data.Dataset.from_tensor_slices(
            (inputs, labels.astype(np.float32))
        ).batch(16)
        model.fit(batches, epochs=2, verbose=0)
        assert int(layer.optimizer.iterations.numpy()) == 8
        found.append(state_of(layer))
        evaluated.append(model.evaluate(batches, verbose=0))
        found[-1]["predicted"] = model.predict(batches, verbose=0)
    one, two = found
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value, err_msg=name)
    np.testing.assert_allclose(*evaluated, rtol=1e-5)


def product_of(version):
    class Product(version.losses.Loss):
        def call(self, y, x):
            return tf.reduce_sum(x * y, axis=1)

    return Product
