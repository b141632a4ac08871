"""`TPUEmbeddingV2` without SparseCores equals `TPUEmbedding`."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.covering import but

tpu = tf.tpu.experimental.embedding

NUM_SAMPLES, NUM_STEPS = 4, 3
OPTIMIZERS = {
    "sgd": tpu.SGD(0.1),
    "adagrad": tpu.Adagrad(0.1, initial_accumulator_value=0.3),
    "adagrad_momentum": tpu.AdagradMomentum(
        0.1, momentum=0.9, exponent=3, beta2=0.9, epsilon=1e-3
    ),
    "adam": tpu.Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-3),
    "ftrl": tpu.FTRL(0.1, l1_regularization_strength=0.01, beta=0.3),
}
# Each value contains the combiner, the number of rows and the dim.
TABLES = {
    "ads": ("sum", 23, 5),
    "words": ("mean", 17, 4),
    "few": ("sqrtn", 3, 2),
}
# Each value contains the table, the form of the input and whether the feature
# has weights.
FEATURES = {
    "shown": ("ads", "ragged", False),
    "clicked": ("ads", "sparse", True),
    "country": ("ads", "dense", False),
    "text": ("words", "ragged", True),
    "title": ("words", "sequence", False),
    "device": ("few", "ragged", False),
}


def config(names=tuple(FEATURES), **options):
    def rows(shape, dtype=None):
        del dtype
        generator = np.random.default_rng(shape[0])
        return generator.normal(size=shape).astype(np.float32)

    tables = {
        name: tpu.TableConfig(
            num_rows, dim, initializer=rows, combiner=combiner, name=name
        )
        for name, (combiner, num_rows, dim) in TABLES.items()
    }
    return {
        name: tpu.FeatureConfig(
            tables[FEATURES[name][0]],
            max_sequence_length=3 * (FEATURES[name][1] == "sequence"),
            **options,
        )
        for name in names
    }


def batch_of(generator):
    """Returns ids, weights and gradients of one replica."""
    ids, weights, gradients = {}, {}, {}
    for name, (table, form, has_weights) in FEATURES.items():
        _, num_rows, dim = TABLES[table]
        if form == "dense":
            ids[name] = tf.constant(
                generator.integers(0, num_rows, NUM_SAMPLES), tf.int64
            )
            weights[name] = None
        else:
            lengths = generator.integers(0, 4, NUM_SAMPLES)
            ids[name] = tf.RaggedTensor.from_row_lengths(
                tf.constant(
                    generator.integers(0, num_rows, lengths.sum()), tf.int64
                ),
                lengths,
            )
            weights[name] = (
                ids[name].with_values(
                    tf.constant(
                        generator.uniform(0.5, 2, lengths.sum()), tf.float32
                    )
                )
                if has_weights
                else None
            )
        if form == "sparse":
            ids[name] = ids[name].to_sparse()
            weights[name] = weights[name].to_sparse()
        shape = [NUM_SAMPLES, *[3] * (form == "sequence"), dim]
        gradients[name] = tf.constant(generator.normal(size=shape), tf.float32)
    return ids, weights, gradients


def per_replica(strategy, parts):
    if len(parts) == 1:
        return parts[0]
    return {
        name: None
        if parts[0][name] is None
        else strategy.experimental_distribute_values_from_function(
            lambda context, name=name: parts[context.replica_id_in_sync_group][
                name
            ]
        )
        for name in parts[0]
    }


def v1_step(embedding, ids, weights, scale):
    embedding.enqueue(ids, weights)
    activations = embedding.dequeue()
    embedding.apply_gradients(scale)
    return activations


def loss_of(activations, scale):
    return tf.add_n(
        [tf.reduce_sum(activations[name] * scale[name]) for name in scale]
    )


def v2_step(embedding, ids, weights, scale):
    activations, preserved = embedding.embedding_lookup(ids, weights)
    embedding.apply_gradients(scale, preserved)
    return activations


def v2_step_in_tape(embedding, ids, weights, scale):
    with tf.GradientTape() as tape:
        activations, preserved = embedding(ids, weights)
        tape.watch(activations)
        loss = loss_of(activations, scale)
    embedding.apply_gradients(tape.gradient(loss, activations), preserved)
    return activations


def v2_step_before_tape(embedding, ids, weights, scale):
    activations, preserved = embedding.dequeue(embedding.enqueue(ids, weights))
    with tf.GradientTape() as tape:
        tape.watch(activations)
        loss = loss_of(activations, scale)
    embedding.apply_gradients(tape.gradient(loss, activations), preserved)
    return activations


V2_STEPS = [v2_step, v2_step_in_tape, v2_step_before_tape]


def train(strategy, embedding, step, *, is_traced, seed=0):
    """Returns the activations of each step, by replica."""

    def on_all(ids, weights, scale):
        return strategy.run(
            lambda *args: step(embedding, *args), args=(ids, weights, scale)
        )

    if is_traced:
        on_all = tf.function(on_all, reduce_retracing=True)
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(NUM_STEPS):
        parts = [
            batch_of(generator) for _ in range(strategy.num_replicas_in_sync)
        ]
        activations = on_all(
            *(per_replica(strategy, list(part)) for part in zip(*parts))
        )
        found.append(
            {
                name: [
                    part.numpy()
                    for part in strategy.experimental_local_results(value)
                ]
                for name, value in activations.items()
            }
        )
    return found


def values_of(embedding):
    """Returns the values of all variables, by table and name."""
    return {
        (table, name): np.concatenate(
            [
                np.atleast_1d(shard.numpy())
                for shard in getattr(value, "variables", [value])
            ]
        )
        for table, by_name in embedding._variables.items()
        for name, value in by_name.items()
    }


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=str(key))


def trained(cls, strategy, step, is_traced=True, optimizer="sgd", **options):
    with strategy.scope():
        embedding = cls(config(), OPTIMIZERS[optimizer], **options)
        embedding.build()
    start = values_of(embedding)
    activations = train(strategy, embedding, step, is_traced=is_traced)
    values = values_of(embedding)
    assert all((values[key] != start[key]).any() for key in start)
    return activations, values


@pytest.mark.parametrize("step", V2_STEPS)
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_equal_steps_of_v1(num_replicas, is_traced, step):
    strategy = strategies.mirrored(num_replicas)
    activations, values = trained(
        tlm.TPUEmbeddingV2, strategy, step, is_traced, "adagrad"
    )
    expected = trained(tlm.TPUEmbedding, strategy, v1_step, True, "adagrad")
    for found, wanted in zip(activations, expected[0], strict=True):
        for name, parts in wanted.items():
            np.testing.assert_array_equal(found[name], parts)
    assert_equal(values, expected[1])


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("optimizer", but(OPTIMIZERS, "adam", "ftrl"))
def test_all_optimizers_equal_those_of_v1(optimizer, num_replicas):
    strategy = strategies.mirrored(num_replicas)
    _, values = trained(
        tlm.TPUEmbeddingV2, strategy, v2_step, optimizer=optimizer
    )
    _, expected = trained(
        tlm.TPUEmbedding, strategy, v1_step, optimizer=optimizer
    )
    assert_equal(values, expected)


@pytest.mark.parametrize(
    "options",
    [
        dict(partitioner=tlm.partitioners.FixedShardsPartitioner(3)),
        dict(table_dtypes="bfloat16", rounding_seed=3),
        dict(pipeline_execution_with_tensor_core=True),
    ],
    ids=["shards", "bfloat16", "pipelined"],
)
def test_options_have_the_meaning_of_v1(options):
    strategy = tf.distribute.get_strategy()
    _, values = trained(tlm.TPUEmbeddingV2, strategy, v2_step, **options)
    _, expected = trained(tlm.TPUEmbedding, strategy, v1_step, **options)
    assert_equal(values, expected)


def words_of(cls=tlm.TPUEmbeddingV2, optimizer=None, **feature):
    """Returns an embedding with one table of ones and one feature."""
    table = tpu.TableConfig(6, 2, tf.ones, combiner="sum", name="words")
    return cls(
        {"title": tpu.FeatureConfig(table, **feature)},
        optimizer or tpu.SGD(1.0),
    )


def rows_of(embedding):
    return embedding.get_embedding_tables()["words"].numpy()[:, 0].tolist()


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_contains_several_lookups_and_updates(num_replicas, is_traced):
    strategy = strategies.mirrored(num_replicas)
    with strategy.scope():
        embedding = words_of()

    def step():
        first, of_first = embedding({"title": tf.constant([0, 1])})
        second, of_second = embedding({"title": tf.constant([1, 2])})
        embedding.apply_gradients({"title": 4 * tf.ones([2, 2])}, of_second)
        third, _ = embedding({"title": tf.constant([1])})
        embedding.apply_gradients({"title": tf.ones([2, 2])}, of_first)
        return first, second, third

    def on_all():
        return strategy.run(step)

    found = (tf.function(on_all) if is_traced else on_all)()
    first, second, third = (
        [
            part.numpy()[:, 0].tolist()
            for part in strategy.experimental_local_results(value["title"])
        ]
        for value in found
    )
    assert first == second == [[1.0, 1.0]] * num_replicas
    assert third == [[1.0 - 4 * num_replicas]] * num_replicas
    assert rows_of(embedding) == [
        1.0 - num_replicas,
        1.0 - 5 * num_replicas,
        1.0 - 4 * num_replicas,
        1.0,
        1.0,
        1.0,
    ]


def test_lookups_without_gradients_do_not_change_tables():
    embedding = words_of()
    for _ in range(100):
        embedding({"title": tf.constant([0])})
    activations, preserved = embedding({"title": tf.constant([0, 5])})
    assert activations["title"].numpy().tolist() == [[1, 1], [1, 1]]
    assert rows_of(embedding) == [1.0] * 6
    embedding.apply_gradients({"title": tf.ones([2, 2])}, preserved)
    assert rows_of(embedding) == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def test_preserved_outputs_can_be_arguments_of_another_function():
    embedding = words_of()
    embedding.build()
    look_up = tf.function(lambda ids: embedding({"title": ids}))
    apply = tf.function(embedding.apply_gradients)
    _, preserved = look_up(tf.constant([0, 5]))
    apply({"title": tf.ones([2, 2])}, preserved)
    assert rows_of(embedding) == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_gradient_of_none_is_zeros(is_traced, caplog):
    embedding = words_of(optimizer=tpu.AdagradMomentum(1.0, momentum=0.5))

    def step(ids, scale):
        _, preserved = embedding({"title": ids})
        embedding.apply_gradients(
            {"title": None if scale is None else scale}, preserved
        )

    if is_traced:
        step = tf.function(step, input_signature=None, reduce_retracing=True)
    step(tf.constant([0, 1]), tf.ones([2, 2]))
    before = rows_of(embedding)
    step(tf.constant([0]), None)
    after = rows_of(embedding)
    # A row with a gradient of zeros still has a momentum.
    assert after[0] < before[0]
    assert after[1:] == before[1:]
    assert "No gradient passed for feature title" in caplog.text


def test_each_id_of_a_dense_input_is_a_sample():
    embedding = words_of(output_shape=[2, 3])
    ids = tf.constant([[0, 1, 1], [2, 2, 2]])
    activations, preserved = embedding({"title": ids})
    assert activations["title"].shape == [2, 3, 2]
    embedding.apply_gradients({"title": tf.ones([2, 3, 2])}, preserved)
    assert rows_of(embedding) == [0.0, -1.0, -2.0, 1.0, 1.0, 1.0]
    flat, _ = embedding({"title": tf.reshape(ids, [6])})
    assert flat["title"].numpy()[..., 0].tolist() == [[0, -1, -1], [-2] * 3]
    with pytest.raises(ValueError, match=r"'title'.*\[2, 3\].*shape \(2, 2\)"):
        embedding({"title": tf.constant([[0, 1], [2, 3]])})


@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_each_row_of_a_ragged_or_sparse_input_is_a_sample(form):
    embedding = words_of(output_shape=[2, 2])
    ids = tf.ragged.constant([[0], [1, 2], [], [2]])
    weights = tf.ragged.constant([[2.0], [1.0, 1.0], [], [4.0]])
    if form == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    activations, _ = embedding({"title": ids}, {"title": weights})
    assert activations["title"].numpy()[..., 0].tolist() == [[2, 2], [0, 4]]


@pytest.mark.parametrize("shape", [None, [2]])
def test_dense_inputs_may_have_weights(shape):
    embedding = words_of(**({"output_shape": shape} if shape else {}))
    activations, preserved = embedding(
        {"title": tf.constant([3, 4])}, {"title": tf.constant([2.0, 3.0])}
    )
    assert activations["title"].numpy().tolist() == [[2, 2], [3, 3]]
    embedding.apply_gradients({"title": tf.ones([2, 2])}, preserved)
    assert rows_of(embedding) == [1.0, 1.0, 1.0, -1.0, -2.0, 1.0]
    with pytest.raises(ValueError, match="one weight for each id"):
        embedding({"title": tf.constant([3, 4])}, {"title": tf.constant([2.0])})


def test_the_configuration_of_sparse_cores_has_no_effect():
    table = tpu.TableConfig(6, 2, tf.ones, combiner="sum", name="words")
    embedding = tlm.TPUEmbeddingV2(
        {"title": tpu.FeatureConfig(table)},
        tpu.SGD(1.0),
        False,
        tpu.SparseCoreEmbeddingConfig(max_ids_per_table={"words": 1}),
    )
    activations, _ = embedding({"title": tf.constant([[0, 1, 2]])})
    assert activations["title"].numpy().tolist() == [[3, 3]]


@pytest.mark.parametrize("is_stacked", [True, False])
def test_the_limits_of_a_batch_are_computed_without_a_tpu(is_stacked):
    ads, users = [
        tpu.TableConfig(64, 8, name=name) for name in ("ads", "users")
    ]
    max_ids, max_unique_ids = tlm.TPUEmbeddingV2.compute_sparse_core_stats(
        # Each SparseCore processes two samples. Even ids are in the same shard.
        {
            "ad": tf.ragged.constant([[0, 2], [2, 4], [1], [3]]),
            "user": tf.constant([2, 2, 0, 4]),
        },
        {
            "ad": tpu.FeatureConfig(ads, output_shape=[4]),
            "user": tpu.FeatureConfig(users, output_shape=[4]),
        },
        num_tpu_chips=1,
        num_sc_per_chip=2,
        optimizer=tpu.SGD(0.1),
        sparse_core_embedding_config=tpu.SparseCoreEmbeddingConfig(
            disable_table_stacking=not is_stacked
        ),
    )
    if is_stacked:
        expected = {"ads_users": 6}, {"ads_users": 4}
    else:
        expected = {"ads": 4, "users": 2}, {"ads": 3, "users": 2}
    assert (
        {name: limit.numpy() for name, limit in max_ids.items()},
        {name: limit.numpy() for name, limit in max_unique_ids.items()},
    ) == expected


def test_checkpoints_of_v1_and_v2_are_equal(tmp_path):
    _, preserved = (embedding := words_of(optimizer=tpu.Adagrad(1.0)))(
        {"title": tf.constant([1])}
    )
    embedding.apply_gradients({"title": tf.ones([1, 2])}, preserved)
    expected = values_of(embedding)
    path = tf.train.Checkpoint(it=embedding).save(str(tmp_path / "v2"))
    for cls in (tlm.TPUEmbedding, tlm.TPUEmbeddingV2):
        restored = words_of(cls, optimizer=tpu.Adagrad(1.0))
        status = tf.train.Checkpoint(it=restored).restore(path)
        restored.build()
        status.assert_consumed()
        assert_equal(values_of(restored), expected)
    path = tf.train.Checkpoint(it=restored).save(str(tmp_path / "again"))
    tf.train.Checkpoint(it=embedding).restore(path).assert_consumed()
    assert list(embedding.variables["words"]) == ["parameters", "accumulators"]


def test_an_export_contains_the_tables(tmp_path):
    embedding = words_of()
    _, preserved = embedding({"title": tf.constant([1])})
    embedding.apply_gradients({"title": tf.ones([1, 2])}, preserved)
    tlm.export(embedding, str(tmp_path / "export"))
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    found = loaded.serve(
        {"title": tf.ragged.constant([[1, 2]], dtype=tf.int64)}
    )
    assert found["title"].numpy().tolist() == [[1.0, 1.0]]


def test_calls_raise_errors():
    embedding = words_of()
    gradients = {"title": tf.ones([1, 2])}
    with pytest.raises(RuntimeError, match="requires a built"):
        embedding.apply_gradients(gradients, None)
    _, preserved = embedding({"title": tf.constant([1])})
    with pytest.raises(TypeError, match="second return value"):
        embedding.apply_gradients(gradients, {})
    with pytest.raises(TypeError, match="return value of `enqueue`"):
        embedding.dequeue({})
    with pytest.raises(ValueError, match=r"shape \(2, 2\)|shape \(1, 3\)"):
        embedding.apply_gradients({"title": tf.ones([1, 3])}, preserved)
    with pytest.raises((TypeError, ValueError), match="structure"):
        embedding.apply_gradients([tf.ones([1, 2])], preserved)
    with pytest.raises((TypeError, ValueError), match="structure"):
        embedding([tf.constant([1])])
    with pytest.raises(ValueError, match="device"):
        embedding.enqueue({"title": tf.constant([1])}, device="/device:TPU:7")
    with pytest.raises(TypeError, match="must be integers|integer"):
        embedding({"title": tf.constant([1.0])})
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="'title'.*'words'"
    ):
        embedding({"title": tf.constant([6])})
    assert rows_of(embedding) == [1.0] * 6


def test_gradients_of_an_old_lookup_raise_an_error():
    embedding = words_of()
    _, old = embedding({"title": tf.constant([1])})
    for _ in range(64):
        embedding({"title": tf.constant([1])})
    with pytest.raises(tf.errors.FailedPreconditionError, match="expired"):
        embedding.apply_gradients({"title": tf.ones([1, 2])}, old)
    assert rows_of(embedding) == [1.0] * 6


def test_tables_without_an_optimizer_are_only_looked_up():
    table = tpu.TableConfig(6, 2, tf.ones, combiner="sum", name="words")
    embedding = tlm.TPUEmbeddingV2({"title": tpu.FeatureConfig(table)})
    activations, preserved = embedding({"title": tf.constant([1])})
    assert activations["title"].numpy().tolist() == [[1, 1]]
    with pytest.raises(RuntimeError, match="requires an optimizer"):
        embedding.apply_gradients({"title": tf.ones([1, 2])}, preserved)


def test_steps_outside_of_replicas_raise():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        embedding = words_of()
    embedding.build()
    with pytest.raises(RuntimeError, match="inside `strategy.run`"):
        embedding({"title": tf.constant([1])})

    @tf.function
    def in_a_loop():
        def core():
            for _ in tf.range(2):
                _, preserved = embedding({"title": tf.constant([1])})
                embedding.apply_gradients({"title": tf.ones([1, 2])}, preserved)

        strategy.run(core)

    with pytest.raises(RuntimeError, match="inside the loop"):
        in_a_loop()
