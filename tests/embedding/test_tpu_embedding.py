"""Tests the arguments, results and errors of tf_layoutmap.TPUEmbedding."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.sharded import ShardedVariable

tpu = tf.tpu.experimental.embedding
FailedPrecondition = tf.errors.FailedPreconditionError
Invalid = tf.errors.InvalidArgumentError


def words(num_rows=10, dim=2, **settings):
    settings.setdefault("initializer", tf.ones)
    settings.setdefault("combiner", "sum")
    return tpu.TableConfig(num_rows, dim, name="words", **settings)


def embedding_of(table=None, optimizer="sgd", *, length=0, **options):
    """Returns an embedding with one table and one feature, `ads/clicks`."""
    feature = tpu.FeatureConfig(
        words() if table is None else table, max_sequence_length=length
    )
    return tlm.TPUEmbedding(
        {"ads": {"clicks": feature}},
        tpu.SGD(0.5) if optimizer == "sgd" else optimizer,
        **options,
    )


def clicks(value):
    return {"ads": {"clicks": value}}


IDS = tf.RaggedTensorSpec([None, None], tf.int64)
BATCH = clicks(np.array([1, 2, 2]))


def train(embedding, ids=BATCH, gradient=1.0):
    embedding.enqueue(ids)
    activations = embedding.dequeue()
    embedding.apply_gradients(
        tf.nest.map_structure(
            lambda one: tf.fill(tf.shape(one), gradient), activations
        )
    )
    return activations


def rows_of(embedding):
    [table] = embedding.embedding_tables.values()
    return table.numpy()[:, 0].tolist()


# Structures and shapes.


@pytest.mark.parametrize(
    "nest",
    [
        lambda f: f,
        lambda f: [f, f],
        lambda f: (f, [f]),
        lambda f: {"b": f, "a": (f,)},
    ],
)
def test_activations_have_the_structure_of_the_config(nest):
    config = nest(tpu.FeatureConfig(words()))
    embedding = tlm.TPUEmbedding(config, tpu.SGD(0.5))
    embedding.enqueue(
        tf.nest.map_structure(lambda _: tf.constant([1, 2]), config)
    )
    activations = embedding.dequeue()
    tf.nest.assert_same_structure(config, activations)
    embedding.apply_gradients(activations)
    assert all(one.shape == [2, 2] for one in tf.nest.flatten(activations))


def test_a_dense_column_gives_one_activation_per_sample():
    embedding = embedding_of()
    embedding.enqueue(clicks(tf.constant([[1], [2]])), training=False)
    assert embedding.dequeue()["ads"]["clicks"].shape == [2, 2]


def test_ids_of_a_dense_matrix_are_combined():
    embedding = embedding_of()
    embedding.enqueue(
        clicks(tf.constant([[1, 2, 3], [1, 1, 1]])), training=False
    )
    assert embedding.dequeue()["ads"]["clicks"].numpy().tolist() == [
        [3, 3],
        [3, 3],
    ]


def test_sequence_features_have_a_position_axis():
    embedding = embedding_of(length=3)
    embedding.enqueue(clicks(tf.ragged.constant([[1], [1, 2, 3, 4], []])))
    activations = embedding.dequeue()
    assert activations["ads"]["clicks"].shape == [3, 3, 2]
    embedding.apply_gradients(tf.nest.map_structure(tf.ones_like, activations))
    # Row 4 is not updated, because its id is after the maximum sequence length.
    assert rows_of(embedding)[:6] == [1, 0, 0.5, 0.5, 1, 1]


def test_a_sparse_sequence_keeps_its_gaps():
    embedding = embedding_of(length=3)
    gappy = tf.SparseTensor([[0, 1], [2, 0], [2, 7]], [1, 2, 4], [3, 8])
    embedding.enqueue(clicks(gappy))
    activations = embedding.dequeue()
    assert activations["ads"]["clicks"][..., 0].numpy().tolist() == [
        [0, 1, 0],
        [0, 0, 0],
        [1, 0, 0],
    ]
    embedding.apply_gradients(tf.nest.map_structure(tf.ones_like, activations))
    assert rows_of(embedding)[:6] == [1, 0.5, 0.5, 1, 1, 1]
    with pytest.raises(Invalid, match="'ads/clicks', sample 0: the positions"):
        embedding.enqueue(
            clicks(tf.SparseTensor([[0, 1], [0, 1]], [1, 2], [3, 8]))
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {"per_replica_batch_size": 2},
        {"per_replica_input_shapes": 2},
        {"per_replica_input_shapes": clicks(tf.TensorShape([2, None]))},
        {"per_replica_input_shapes": clicks((2,))},
    ],
)
def test_build_with_a_batch_size_gives_static_shapes(arguments):
    embedding = embedding_of()
    embedding.build(**arguments)

    @tf.function(input_signature=[IDS])
    def step(ids):
        embedding.enqueue(clicks(ids), training=False)
        found = embedding.dequeue()["ads"]["clicks"]
        assert found.shape == [2, 2]
        return found

    step(tf.ragged.constant([[1], [2, 3]], dtype=tf.int64))
    with pytest.raises(Invalid, match="must have 2 samples"):
        step(tf.ragged.constant([[1]], dtype=tf.int64))
    with pytest.raises(ValueError, match=r"must have 2 samples.*Received: 3"):
        embedding.enqueue(BATCH)


def test_batch_sizes_can_change_without_build():
    embedding = embedding_of()
    for size in (3, 1, 0):
        embedding.enqueue(clicks(tf.ones([size], tf.int32)), training=False)
        assert embedding.dequeue()["ads"]["clicks"].shape == [size, 2]


def test_build_is_idempotent_except_for_other_sizes():
    embedding = embedding_of()
    embedding.build(4)
    [table] = embedding.embedding_tables.values()
    embedding.build()
    embedding.build(4)
    assert next(iter(embedding.embedding_tables.values())) is table
    with pytest.raises(ValueError, match=r"\[4\]. Received: \[5\]"):
        embedding.build(5)


def test_build_with_invalid_shapes_raises():
    with pytest.raises(ValueError, match="structure of `feature_config`"):
        embedding_of().build({"ads": {}})
    with pytest.raises(ValueError, match="'ads/clicks'"):
        embedding_of().build(clicks([]))
    with pytest.raises(ValueError, match="'ads/clicks'"):
        embedding_of(length=2).build(clicks([2, None, 2]))
    with pytest.raises(ValueError, match="at least 1"):
        embedding_of().build(per_replica_batch_size=0)


def test_build_runs_once_while_functions_are_traced():
    embedding = embedding_of()

    @tf.function
    def step(ids):
        embedding.enqueue(clicks(ids))
        embedding.apply_gradients(embedding.dequeue())

    step(tf.constant([1]))
    step(tf.constant([1, 1]))
    assert rows_of(embedding)[:3] == [1, 0, 1]


def test_tensorflow_1_graphs_raise():
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eager"):
        embedding_of().build()


# Tables.


def test_tables_are_keyed_by_their_config():
    table = words()
    embedding = embedding_of(table)
    assert list(embedding.embedding_tables) == [table]
    assert isinstance(embedding.embedding_tables[table], tf.Variable)
    sharded = embedding_of(
        table, partitioner=tlm.partitioners.FixedShardsPartitioner(3)
    )
    assert isinstance(sharded.embedding_tables[table], ShardedVariable)


def test_partitioners_of_tensorflow_are_supported():
    embedding = embedding_of(
        partitioner=(
            tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
        )
    )
    train(embedding)
    assert rows_of(embedding)[:3] == [1, 0.5, 0]


def test_slot_variables_are_keyed_by_config_and_name():
    table = words()
    embedding = embedding_of(table, tpu.Adagrad(0.5))
    [(name, slot)] = embedding.slot_variables[table].items()
    assert name == "accumulators"
    assert slot.shape == [10, 2]
    assert embedding_of(table).slot_variables == {table: {}}


def test_two_embeddings_can_share_their_configs():
    table = words()
    first, second = embedding_of(table), embedding_of(table, tpu.SGD(1.0))
    train(first)
    train(second)
    assert rows_of(first)[:3] == [1, 0.5, 0]
    assert rows_of(second)[:3] == [1, 0, -1]
    assert table.optimizer is None


def test_the_next_lookup_sees_an_assigned_table():
    embedding = embedding_of()
    embedding.build()
    [table] = embedding.embedding_tables.values()
    embedding.enqueue(BATCH, training=False)
    table.assign(tf.fill([10, 2], 7.0))
    assert np.all(embedding.dequeue()["ads"]["clicks"].numpy() == 7)


def test_an_update_does_not_change_an_earlier_read():
    embedding = embedding_of()
    embedding.build()
    [table] = embedding.embedding_tables.values()
    before = table.read_value()
    train(embedding)
    assert np.all(before.numpy() == 1)


def test_call_looks_up_outside_of_steps():
    embedding = embedding_of()
    train(embedding)
    found = embedding(clicks(tf.ragged.constant([[1, 2], []])))
    assert found["ads"]["clicks"].numpy().tolist() == [[0.5, 0.5], [0, 0]]
    assert embedding.stats()["pending"] == [0]


# Learning rates.


def test_a_shared_dynamic_rate_is_called_once_per_update():
    calls = []
    value = tf.Variable(0.5)

    def rate():
        calls.append(1)
        return value

    embedding = tlm.TPUEmbedding(
        [
            tpu.FeatureConfig(words(optimizer=tpu.SGD(rate))),
            tpu.FeatureConfig(
                tpu.TableConfig(3, 2, tf.ones, tpu.SGD(rate), name="users")
            ),
        ],
        None,
    )

    def step():
        embedding.enqueue([np.array([1]), np.array([1])])
        embedding.apply_gradients(embedding.dequeue())

    step()
    assert len(calls) == 1
    value.assign(1.0)
    step()
    assert len(calls) == 2
    assert [
        one.numpy()[1, 0] for one in embedding.embedding_tables.values()
    ] == [0, 0]


def test_a_rate_from_a_variable_changes_inside_a_function():
    rate = tf.Variable(0.5)
    embedding = embedding_of(optimizer=tpu.SGD(lambda: rate * 2))
    step = tf.function(lambda: train(embedding))
    step()
    rate.assign(0.25)
    step()
    assert rows_of(embedding)[:2] == [1, -0.5]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_invalid_dynamic_rate_raises(bad):
    embedding = embedding_of(optimizer=tpu.SGD(lambda: bad))
    embedding.enqueue(BATCH)
    activations = embedding.dequeue()
    with pytest.raises(Invalid, match=r"words.*learning"):
        embedding.apply_gradients(activations)
    assert set(rows_of(embedding)) == {1}


def test_a_dynamic_rate_that_is_not_a_scalar_raises():
    embedding = embedding_of(optimizer=tpu.SGD(lambda: [0.1, 0.2]))
    embedding.enqueue(BATCH)
    with pytest.raises(ValueError, match=r"return a number.*'words'"):
        embedding.apply_gradients(embedding.dequeue())


def test_a_rate_that_is_constant_in_a_function_warns(caplog):
    embedding = embedding_of(optimizer=tpu.SGD(lambda: 0.5))
    with caplog.at_level("WARNING", logger="absl"):
        train(embedding)
        assert "so it is constant" not in caplog.text
        tf.function(lambda: train(embedding))()
    assert "rate of table words" in caplog.text


# Gradients.


def test_a_missing_gradient_is_zeros(caplog):
    config = [tpu.FeatureConfig(words()), tpu.FeatureConfig(words())]
    config[1].table = config[0].table
    embedding = tlm.TPUEmbedding(config, tpu.SGD(0.5))
    embedding.enqueue([np.array([1]), np.array([1, 2])])
    activations = embedding.dequeue()
    with caplog.at_level("WARNING", logger="absl"):
        embedding.apply_gradients([activations[0], None])
    assert "No gradient passed for feature 1" in caplog.text
    assert rows_of(embedding)[:3] == [1, 0.5, 1]


def test_a_missing_gradient_has_the_size_of_its_activation():
    embedding = embedding_of()

    @tf.function(input_signature=[IDS])
    def step(ids):
        embedding.enqueue(clicks(ids))
        embedding.dequeue()
        embedding.apply_gradients(clicks(None))

    step(tf.ragged.constant([[1], []], dtype=tf.int64))
    step(tf.ragged.constant([[1]], dtype=tf.int64))
    assert embedding.stats()["num_updates"] == 2


def test_a_missing_gradient_in_another_function_raises():
    embedding = embedding_of()
    embedding.enqueue(BATCH)
    embedding.dequeue()
    with pytest.raises(ValueError, match=r"'ads/clicks' is None.*pass zeros"):
        tf.function(lambda: embedding.apply_gradients(clicks(None)))()


def test_indexed_slices_are_summed():
    embedding = embedding_of()
    embedding.enqueue(BATCH)
    with tf.GradientTape() as tape:
        activations = embedding.dequeue()
        tape.watch(activations)
        loss = tf.reduce_sum(tf.gather(activations["ads"]["clicks"], [0, 0]))
    gradients = tape.gradient(loss, activations)
    assert isinstance(gradients["ads"]["clicks"], tf.IndexedSlices)
    embedding.apply_gradients(gradients)
    assert rows_of(embedding)[:3] == [1, 0, 1]


@pytest.mark.parametrize(
    ("gradient", "error", "words_"),
    [
        (np.ones([3, 2], np.float32), ValueError, "ndarray.*'ads/clicks'"),
        (tf.ones([3, 2], tf.float64), ValueError, "float64.*'ads/clicks'"),
        (tf.ones([3, 3]), ValueError, r"shape \(3, 3\).*'ads/clicks'"),
        (tf.ones([3]), ValueError, r"shape \(3,\).*Expected shape \(None, 2\)"),
        (
            tf.ones([2, 2]),
            Invalid,
            r"^Feature 'ads/clicks': its gradient must be "
            r"shaped like its activation, \[3, 2\]. Received: \[2, 2\]$",
        ),
    ],
)
def test_gradients_of_wrong_type_or_shape_raise(gradient, error, words_):
    embedding = embedding_of()
    embedding.enqueue(BATCH)
    activations = embedding.dequeue()
    with pytest.raises(error, match=words_):
        embedding.apply_gradients(clicks(gradient))
    # After the failed call, the step is still pending.
    embedding.apply_gradients(activations)


def test_wrong_structures_raise():
    embedding = embedding_of()
    with pytest.raises(ValueError, match="`features` must have the structure"):
        embedding.enqueue({"ads": {}})
    with pytest.raises(TypeError, match="`features` must have the structure"):
        embedding.enqueue([BATCH])
    with pytest.raises(ValueError, match=r"use tf.constant\(") as caught:
        embedding.enqueue(clicks([1, 2]))
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None
    with pytest.raises(ValueError, match="`weights` must have the structure"):
        embedding.enqueue(BATCH, {"ads": {"other": None}})
    embedding.enqueue(BATCH)
    embedding.dequeue()
    with pytest.raises(ValueError, match="`gradients` must have the"):
        embedding.apply_gradients({"ads": {}})


# Order of calls.


def test_four_steps_can_be_enqueued_ahead():
    embedding = embedding_of()
    for row in range(4):
        embedding.enqueue(clicks(np.array([row])))
    assert embedding.stats()["pending"] == [4]
    with pytest.raises(FailedPrecondition, match="call `dequeue` first"):
        embedding.enqueue(BATCH)
    for _ in range(4):
        embedding.apply_gradients(embedding.dequeue())
    assert rows_of(embedding)[:5] == [0.5] * 4 + [1]


def test_calls_before_build_raise():
    for call in (
        embedding_of().dequeue,
        embedding_of().reset,
        embedding_of().stats,
        lambda: embedding_of().apply_gradients(clicks(None)),
    ):
        with pytest.raises(RuntimeError, match="call `enqueue` or `build`"):
            call()


def test_dequeue_and_apply_without_a_step_raise():
    embedding = embedding_of()
    embedding.build()
    with pytest.raises(FailedPrecondition, match="call `enqueue` first"):
        embedding.dequeue()
    with pytest.raises(FailedPrecondition, match="needs a dequeued step"):
        embedding.apply_gradients(clicks(tf.ones([3, 2])))


def test_dequeue_before_the_last_step_is_applied_raises():
    embedding = embedding_of()
    embedding.enqueue(BATCH)
    embedding.enqueue(BATCH)
    activations = embedding.dequeue()
    with pytest.raises(FailedPrecondition, match="still awaits its gradients"):
        embedding.dequeue()
    assert embedding.stats()["awaiting"] == [True]
    embedding.apply_gradients(activations)
    embedding.apply_gradients(embedding.dequeue())
    with pytest.raises(FailedPrecondition, match="needs a dequeued step"):
        embedding.apply_gradients(activations)


def test_applying_after_a_forward_step_raises():
    embedding = embedding_of()
    embedding.enqueue(BATCH, training=False)
    activations = embedding.dequeue()
    with pytest.raises(FailedPrecondition, match="training=False"):
        embedding.apply_gradients(activations)


def test_training_can_be_a_tensor():
    embedding = embedding_of()

    @tf.function
    def step(training):
        embedding.enqueue(BATCH, training=training)
        activations = embedding.dequeue()
        if training:
            embedding.apply_gradients(activations)

    step(tf.constant(True))
    step(tf.constant(False))
    assert rows_of(embedding)[:3] == [1, 0.5, 0]


@pytest.mark.parametrize("bad", [None, 1, "yes"])
def test_training_of_wrong_type_raises(bad):
    with pytest.raises(TypeError, match="`training` must be a bool"):
        embedding_of().enqueue(BATCH, training=bad)


def test_reset_discards_the_steps_in_flight():
    embedding = embedding_of()
    embedding.enqueue(BATCH)
    embedding.enqueue(BATCH)
    embedding.dequeue()
    embedding.reset()
    stats = embedding.stats()
    assert (stats["pending"], stats["awaiting"]) == ([0], [False])
    assert (stats["num_updates"], stats["poisoned"]) == (0, "")
    train(embedding)
    assert rows_of(embedding)[:3] == [1, 0.5, 0]


def test_an_embedding_without_optimizer_only_serves():
    embedding = embedding_of(optimizer=None)
    with pytest.raises(
        RuntimeError,
        match=(
            "'words' has none. Pass `optimizer=` to the TPUEmbedding"
            ".* to serve only, use `enqueue.training=False.`"
        ),
    ):
        embedding.enqueue(BATCH)
    embedding.enqueue(BATCH, training=False)
    activations = embedding.dequeue()
    with pytest.raises(RuntimeError, match="'words' has none"):
        embedding.apply_gradients(activations)
    with pytest.raises(FailedPrecondition, match="'words' has no optimizer"):
        embedding.enqueue(BATCH, training=tf.constant(True))
    assert embedding.slot_variables.popitem()[1] == {}


def test_stats_raises_in_a_function():
    embedding = embedding_of()
    embedding.build()
    with pytest.raises(RuntimeError, match=r"outside tf.function"):
        tf.function(embedding.stats)()


# The engine rejects these invalid inputs and does not enqueue a step.


@pytest.mark.parametrize(
    ("value", "words_"),
    [
        (
            np.array([0, 10]),
            "^Feature 'ads/clicks', sample 1: id 10 is outside "
            "table 'words' with 10 rows; set out_of_range=.* to accept it$",
        ),
        (np.array([-1, 0]), "'ads/clicks', sample 0: id -1 .*'words' with 10"),
        (np.array([2**33 + 5]), f"sample 0: id {2**33 + 5} "),
        (
            tf.RaggedTensor.from_row_splits([1, 2], [0, 2, 1], validate=False),
            "'ads/clicks'.*not decrease.*2, then 1",
        ),
        (
            tf.RaggedTensor.from_row_splits([1, 2], [0, 1], validate=False),
            "'ads/clicks'.*end with the number of ids",
        ),
        (
            tf.SparseTensor([[1, 0], [0, 0]], [1, 2], [2, 1]),
            "'ads/clicks'.*ordered by sample",
        ),
        (
            tf.SparseTensor([[2, 0]], [1], [2, 1]),
            "'ads/clicks'.*2 samples. Received: sample 2",
        ),
    ],
)
def test_bad_ids_raise_with_names(value, words_):
    embedding = embedding_of()
    with pytest.raises(Invalid, match=words_):
        embedding.enqueue(clicks(value))
    assert embedding.stats()["pending"] == [0]
    train(embedding)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_raise(bad):
    ids = tf.ragged.constant([[1], [2, 3]])
    weights = ids.with_values(tf.constant([1.0, 1.0, bad]))
    with pytest.raises(Invalid, match="'ads/clicks', sample 1"):
        embedding_of().enqueue(clicks(ids), clicks(weights))


def test_a_failed_check_in_a_function_enqueues_nothing():
    embedding = embedding_of()
    embedding.build()
    enqueue = tf.function(
        lambda ids, weights: embedding.enqueue(clicks(ids), clicks(weights))
    )
    ids = tf.ragged.constant([[1], [2, 3]])
    with pytest.raises(Invalid, match="the same row_splits as its ids"):
        enqueue(ids, tf.ragged.constant([[1.0, 1.0], [1.0]]))
    assert embedding.stats()["pending"] == [0]


# Construction.


@pytest.mark.parametrize(
    ("options", "error", "words_"),
    [
        (
            {"pipeline_execution_with_tensor_core": 1},
            TypeError,
            "pipeline_execution_with_tensor_core",
        ),
        ({"out_of_range": "wrap"}, ValueError, "`out_of_range` must be one of"),
        ({"wire_dtype": "int8"}, ValueError, "`wire_dtype` must be one of"),
        (
            {"wire_dtype": "bfloat16"},
            ValueError,
            "without servers no rows are sent",
        ),
        ({"partitioner": 3}, TypeError, "`partitioner` must be callable"),
    ],
)
def test_invalid_options_raise(options, error, words_):
    with pytest.raises(error, match=words_):
        embedding_of(**options)


def test_invalid_configs_raise():
    with pytest.raises(ValueError, match="at least one FeatureConfig"):
        tlm.TPUEmbedding({}, tpu.SGD(0.1))
    with pytest.raises(ValueError, match="Multiple tables with name 'words'"):
        tlm.TPUEmbedding(
            [tpu.FeatureConfig(words()), tpu.FeatureConfig(words())],
            tpu.SGD(0.1),
        )
    with pytest.raises(ValueError, match="learning rate"):
        embedding_of(optimizer=tpu.SGD(np.nan))


def test_sparse_core_config_raises():
    with pytest.raises(ValueError, match="use tlm.TPUEmbeddingV2"):
        tlm.TPUEmbedding(
            tpu.FeatureConfig(tpu.TableConfig(4, 1)),
            tpu.SGD(1.0),
            sparse_core_embedding_config=tpu.SparseCoreEmbeddingConfig(),
        )


def test_a_bad_id_in_call_names_the_id_and_the_option():
    with pytest.raises(Invalid) as caught:
        embedding_of()(clicks(np.array([0, 10])))
    assert str(caught.value) == (
        "Feature 'ads/clicks': ids must be in [0, 10), the rows of table "
        "'words'; `out_of_range` sets how other ids are handled. Received: [10]"
    )


def test_an_optimizer_class_raises():
    with pytest.raises(
        ValueError,
        match=(
            r"must be an object, such as SGD\(learning_rate=0.1\). Received: "
            r"the class SGD \(table 'words'\)"
        ),
    ):
        embedding_of(optimizer=tpu.SGD)


def test_a_learning_rate_of_none_raises():
    embedding = embedding_of(optimizer=tpu.SGD(lambda: None))
    embedding.enqueue(BATCH)
    activations = embedding.dequeue()
    with pytest.raises(ValueError, match="Received: None .table 'words'"):
        embedding.apply_gradients(activations)


def test_the_representation_names_the_tables():
    words = tpu.TableConfig(4, 2, name="words")
    embedding = tlm.TPUEmbedding(tpu.FeatureConfig(words), tpu.SGD(1.0))
    shown = "<TPUEmbedding of 1 table (words: 4 x 2 float32, sgd)>"
    assert repr(embedding) == shown
