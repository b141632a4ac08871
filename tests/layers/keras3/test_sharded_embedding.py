"""Compares `ShardedEmbedding` with `keras.layers.Embedding`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers import models

OPTIMIZERS = (None, "adagrad")


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_shards", [1, 3, 10])
@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint32, np.float32]
)
def test_rows_are_in_the_order_of_the_ids(optimizer, num_shards, dtype):
    layer = models.make_layer(optimizer, num_shards)
    for ids in ([[7, 0, 9], [4, 4, 1]], [], 3):
        ids = np.array(ids, dtype)
        rows = layer(ids)
        assert rows.dtype == tf.float32
        np.testing.assert_array_equal(
            rows, models.start_rows()[ids.astype(int)]
        )
    assert len(layer.embeddings.variables) == num_shards


def test_ragged_ids_return_ragged_rows():
    ids = tf.ragged.constant([[7, 0], [], [9]], dtype=tf.int64)
    rows = models.make_layer("sgd")(ids)
    assert rows.to_list() == [
        [models.start_rows()[i].tolist() for i in row] for row in ids.to_list()
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [10, -1, 2**31 - 1])
@pytest.mark.parametrize("is_function", [False, True])
def test_an_out_of_range_id_raises_with_layer_and_id(
    optimizer, bad, is_function
):
    layer = models.make_layer(optimizer)
    layer.build()
    call = tf.function(layer) if is_function else layer
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        call(tf.constant([3, bad]))
    assert "'words/embeddings'" in str(caught.value)
    assert str(bad) in str(caught.value)
    assert "10 rows" in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (np.array([0.5]), tf.errors.InvalidArgumentError, "must be integers"),
        (
            np.array([np.nan]),
            tf.errors.InvalidArgumentError,
            "must be integers",
        ),
        (np.array([True]), TypeError, "must be integers"),
        (np.array([1], np.uint64), TypeError, "must be integers"),
    ],
)
def test_invalid_ids_raise(ids, error, words):
    with pytest.raises(error, match=words) as caught:
        models.make_layer("sgd")(ids)
    assert "'words'" in str(caught.value)


def test_floats_that_cannot_represent_all_ids_raise():
    layer = tlm.layers.ShardedEmbedding(
        2**11 + 1, 1, embeddings_initializer="zeros"
    )
    layer(np.array([2048.0], np.float32))
    with pytest.raises(TypeError, match="float16, which does not represent"):
        layer(np.array([2048.0], np.float16))
    bfloat16 = tf.constant([256.0], tf.bfloat16)
    with pytest.raises(TypeError, match="bfloat16, which does not represent"):
        layer(bfloat16)
    small = tlm.layers.ShardedEmbedding(256, 1)
    assert small(bfloat16 - 1).shape == [1, 1]


def model_that_rounds(dtype, layer_dtype, num_rows):
    """Returns a model whose inputs Keras rounds before the layer sees them."""

    class Rounding(keras.Model):
        def __init__(self):
            super().__init__(dtype=dtype)
            ids = keras.Input([1])
            layer = tlm.layers.ShardedEmbedding(
                num_rows, 2, dtype=layer_dtype, name="words"
            )
            self.inner = keras.Model(ids, layer(ids), dtype="float32")

        def call(self, inputs):
            return self.inner(inputs)

    return Rounding()


@pytest.mark.parametrize(
    ("dtype", "largest"), [("mixed_bfloat16", 256), ("mixed_float16", 2048)]
)
def test_floats_that_keras_rounds_to_16_bits_raise(dtype, largest):
    ids = np.array([[2.0]], np.float32)
    assert model_that_rounds(dtype, dtype, largest)(ids).shape == [1, 1, 2]
    words = rf"dtype float32 in a.*compute dtype {dtype[6:]}.*'words'"
    for layer_dtype in (dtype, "float32"):
        model = model_that_rounds(dtype, layer_dtype, largest + 1)
        with pytest.raises(TypeError, match=words):
            model(ids)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_masked_ids_do_not_train_layers_after_the_mask(optimizer):
    ids = keras.Input([models.LENGTH], dtype="int64")
    layer = models.make_layer(optimizer, mask_zero=True)
    pooled = keras.layers.GlobalAveragePooling1D()(layer(ids))
    model = keras.Model(ids, pooled)
    batch = np.array([[3, 0, 0], [0, 5, 7]])
    start = models.start_rows()
    np.testing.assert_array_equal(
        model(batch), np.stack([start[3], (start[5] + start[7]) / 2])
    )
    model.compile("sgd", "mse")
    model.train_on_batch(batch, np.zeros([2, 2]))
    changed = np.any(layer.embeddings.numpy() != start, axis=1)
    assert np.flatnonzero(changed).tolist() == [3, 5, 7]


def test_mask_zero_masks_zeros():
    ids = np.array([[3, 0]])
    masked = models.make_layer(None, mask_zero=True).compute_mask(ids)
    assert masked.numpy().tolist() == [[True, False]]
    assert models.make_layer(None).compute_mask(ids) is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_keras_counts_and_lists_the_table(optimizer, capsys):
    model, layer = models.make_model(optimizer)
    assert layer.count_params() == models.NUM_ROWS * models.DIM
    assert model.output_shape == (None, models.LENGTH, models.DIM)
    model.summary(print_fn=print)
    printed = capsys.readouterr().out
    assert "words (ShardedEmbedding)" in printed
    assert "Trainable params: 20" in printed
    assert len(layer.weights) == (3 if optimizer is None else 1)
    for weight in layer.weights:
        assert "words/embeddings" in weight.path
        assert "[[" not in repr(weight) or optimizer is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_get_weights_and_set_weights_use_the_full_table(optimizer):
    model, layer = models.make_model(optimizer)
    weights = model.get_weights()
    np.testing.assert_array_equal(np.concatenate(weights), models.start_rows())
    model.set_weights([-weight for weight in weights])
    np.testing.assert_array_equal(
        layer.embeddings.numpy(), -models.start_rows()
    )


@pytest.mark.parametrize(
    "optimizer", [None, "sgd", tf.tpu.experimental.embedding.Adagrad(0.5, 2.0)]
)
def test_its_config_creates_an_equal_layer(optimizer):
    layer = models.make_layer(optimizer, 4, mask_zero=True, trainable=False)
    again = tlm.layers.ShardedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.num_shards, again.mask_zero, again.trainable) == (
        4,
        True,
        False,
    )
    assert type(again.optimizer) is type(layer.optimizer)


def test_a_cloned_model_has_a_separate_table_and_optimizer():
    model, layer = models.make_model("adagrad")
    clone = keras.models.clone_model(model)
    other = clone.get_layer("words")
    assert other.optimizer is not layer.optimizer
    other.embeddings.assign(-models.start_rows())
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())


def test_shards_are_initialized_one_by_one():
    asked = []

    def initializer(
        shape, dtype=None, partition_shape=None, partition_offset=None
    ):
        asked.append((tuple(partition_shape), tuple(partition_offset)))
        return tf.zeros(partition_shape, dtype)

    tlm.layers.ShardedEmbedding(
        7, 2, num_shards=3, embeddings_initializer=initializer
    ).build()
    assert asked == [((3, 2), (0, 0)), ((2, 2), (3, 0)), ((2, 2), (5, 0))]


def test_default_initial_values_are_uniform_and_differ_between_shards():
    def rows_with(seed):
        keras.utils.set_random_seed(seed)
        layer = tlm.layers.ShardedEmbedding(1000, 4, num_shards=2)
        layer.build()
        return layer.embeddings.numpy()

    rows = rows_with(3)
    assert np.abs(rows).max() <= 0.05 and np.abs(rows.mean()) < 0.003
    assert np.any(rows[:500] != rows[500:])
    np.testing.assert_array_equal(rows_with(3), rows)
    assert np.any(rows_with(4) != rows)


def test_a_partitioner_sets_the_number_of_shards():
    layer = tlm.layers.ShardedEmbedding(
        10, 2, partitioner=tlm.partitioners.MaxSizePartitioner(32)
    )
    layer.build()
    assert layer.num_shards == len(layer.embeddings.variables) == 3
    with pytest.warns(UserWarning, match="3 shards instead of num_shards=8"):
        layer = tlm.layers.ShardedEmbedding(3, 2, num_shards=8)
    assert layer.num_shards == 3
    with pytest.warns(UserWarning, match="2 shards instead of num_shards=3"):
        tlm.layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(16), 2, num_shards=3, optimizer="sgd"
        )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"input_dim": 0}, ValueError, "`input_dim` must be at least 1"),
        ({"output_dim": 2.0}, TypeError, "`output_dim` must be an integer"),
        ({"num_shards": 0}, ValueError, "`num_shards` must be at least 1"),
        (
            {"num_shards": 2, "partitioner": lambda shape, dtype: [2, 1]},
            ValueError,
            "must not both be given",
        ),
        ({"partitioner": lambda shape, dtype: [1, 2]}, ValueError, "rows only"),
        ({"partitioner": 3}, TypeError, "must be callable"),
        (
            {"partitioner": tlm.partitioners.FixedShardsPartitioner},
            TypeError,
            "not a class",
        ),
        ({"optimizer": "adam"}, ValueError, r"embedding\.Adam\(learning_rate"),
        ({"mask_zero": 1}, TypeError, "must be a bool"),
        ({"optimizer": "sgd", "dtype": "float64"}, ValueError, "float64"),
    ],
)
def test_invalid_arguments_raise(arguments, error, words):
    with pytest.raises(error, match=words):
        tlm.layers.ShardedEmbedding(
            **{"input_dim": 10, "output_dim": 2, **arguments}
        )


@pytest.mark.parametrize("layers", [tlm.layers, tlm.layers.tf_keras])
def test_a_missing_argument_raises_with_the_name_of_the_layer(layers):
    with pytest.raises(TypeError, match=r"^ShardedEmbedding.__init__.*input_d"):
        layers.ShardedEmbedding(vocabulary_size=4, dim=2)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "mixed_bfloat16"])
def test_other_dtypes_equal_keras_embedding(dtype):
    layer = models.make_layer(None, dtype=dtype)
    rows = layer(np.array([7, 0]))
    assert rows.dtype == layer.compute_dtype
    assert layer.embeddings.dtype == layer.variable_dtype
    np.testing.assert_array_equal(
        tf.cast(rows, tf.float32), models.start_rows()[[7, 0]]
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_subclassed_model_builds_the_layer_when_called(optimizer):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.words = models.make_layer(optimizer)

        def call(self, ids):
            return self.words(ids)

    ids, y = models.batches(1)
    model = Model()
    model.compile("sgd", models.weighted_sum)
    model.fit(ids, y, batch_size=models.NUM_SAMPLES, verbose=0)
    assert np.any(model.words.embeddings.numpy() != models.start_rows())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_symbolic_call_before_build_returns_the_shape(optimizer):
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.words = models.make_layer(optimizer)

        def call(self, ids):
            return self.words(ids)

    ids = keras.Input([models.LENGTH], dtype="int64")
    model = keras.Model(ids, Outer()(ids))
    assert model.output_shape == (None, models.LENGTH, models.DIM)
    batch, _ = models.batches(1)
    np.testing.assert_array_equal(model(batch), models.start_rows()[batch])


def test_reading_the_table_before_build_raises():
    with pytest.raises(AttributeError, match="no table before it is built"):
        models.make_layer("sgd").embeddings  # noqa: B018


def test_a_training_step_reads_no_full_shard():
    model, layer = models.make_model("adagrad")
    model.compile("sgd", models.weighted_sum)
    ids, y = map(tf.constant, models.batches(1))
    step = tf.function(model.train_step).get_concrete_function((ids, y))
    shards = {
        id(shard.handle)
        for shard in (
            *layer.embeddings.variables,
            *layer.optimizer.accumulators.variables,
        )
    }
    tables = {
        internal.name
        for external, internal in step.graph.captures
        if id(external) in shards
    }
    used_by = {
        op.type
        for op in step.graph.get_operations()
        for value in op.inputs
        if value.name in tables
    }
    assert "LayoutMap>ApplyRowGradients" in used_by
    assert used_by <= {
        "LayoutMap>ApplyRowGradients",
        "LayoutMap>GatherRows",
        "ResourceGather",
        "VariableShape",
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_out_of_range_id_in_fit_raises_with_the_layer_name(optimizer):
    # If the layer has an optimizer, the gradient also routes the ids, and may
    # raise the error before the lookup.
    model = keras.Sequential(
        [
            keras.Input([2], dtype="int64"),
            tlm.layers.ShardedEmbedding(
                10, 4, num_shards=2, optimizer=optimizer, name="users"
            ),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=(
            r"Id 12 \(ids\[\d\]\) is outside table '.*users/embeddings' with "
            "10 rows"
        ),
    ):
        model.fit(np.array([[1, 2], [3, 12]]), np.zeros([2, 1]), verbose=0)


@pytest.mark.parametrize("value", [1.5, 1, True, "a", [1, 2], ["a"]])
def test_python_values_raise_with_the_supported_form(value):
    layer = tlm.layers.ShardedEmbedding(10, 4, name="users")
    with pytest.raises(
        TypeError,
        match=(
            r"must be a tensor or an array, such as tf.constant\(\[1, 2\]\)"
            r".*layer 'users'"
        ),
    ):
        layer(value)
    with pytest.raises(TypeError, match="Ids must be one tensor.*'users'"):
        layer({"ids": tf.constant([1])})
    assert layer([tf.constant([1]), tf.constant([2])]).shape == (2, 1, 4)


def test_strings_raise_with_the_vocabulary_that_supports_them():
    layer = tlm.layers.ShardedEmbedding(10, 4, name="users")
    with pytest.raises(
        TypeError,
        match=(
            r"layer 'users' must be integers in \[0, 10\). Received: strings."
            r".*`input_dim=tlm.vocabulary.OpenVocabulary\(capacity\)`"
        ),
    ):
        layer(tf.constant(["ann"]))


def test_fractional_ids_are_shown_in_the_error():
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=(r"Ids of layer 'users' must be integers. Received: \[1.5\]"),
    ):
        tlm.layers.ShardedEmbedding(10, 4, name="users")(
            np.array([1.0, 1.5, 2.0])
        )
