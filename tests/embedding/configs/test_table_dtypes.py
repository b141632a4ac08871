"""Tests tables with 16-bit rows."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.reference import rounding

tpu = tf.tpu.experimental.embedding

DTYPES = ["bfloat16", "float16"]
NUM_ROWS, DIM = 7, 19


def embedding_of(
    dtype,
    *,
    rows=None,
    optimizer=None,
    num_shards=1,
    seed=5,
    strategy=None,
    **options,
):
    """Returns an embedding with one table `words`, which is zero by default."""
    rows = np.zeros([NUM_ROWS, DIM], np.float32) if rows is None else rows

    def initializer(shape, shard_info=None, dtype=None):
        del shape, dtype
        first = shard_info.offset[0]
        return tf.constant(rows[first : first + shard_info.shape[0]])

    with (strategy or tf.distribute.get_strategy()).scope():
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(
                    *rows.shape, initializer, combiner="sum", name="words"
                )
            ),
            optimizer or tpu.SGD(1.0),
            table_dtypes=dtype,
            rounding_seed=seed,
            partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
            **options,
        )


def bits_of(embedding):
    [table] = embedding.embedding_tables.values()
    return table.numpy().view(np.uint16)


def train(embedding, ids, gradient):
    embedding.enqueue(tf.constant(ids))
    embedding.dequeue()
    embedding.apply_gradients(tf.constant(gradient, tf.float32))


def special_values():
    rng = np.random.default_rng(1)
    # Subnormal float32 values are excluded, because TensorFlow flushes them to
    # 0.
    spread = rng.normal(size=9 * DIM) * 10.0 ** rng.integers(-30, 30, 9 * DIM)
    known = [
        0.0,
        1.0,
        -1.0,
        2.0**-14,
        2.0**-15 * 1.37,
        2.0**-24,
        2.0**-30,
        65504.0,
        65519.9,
        65520.0,
        1e5,
        -1e5,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        1 + 2.0**-9,
        1 / 3,
    ]
    return np.concatenate([known, spread]).astype(np.float32).reshape(10, DIM)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_matches_the_reference(dtype):
    values = special_values()
    embedding = embedding_of(dtype, rows=np.zeros_like(values))
    # Rows are initially zero, so a gradient of `-value` sets a row to `value`.
    train(embedding, np.arange(10), -values)
    found = bits_of(embedding)
    for row, value in enumerate(values):
        wanted = rounding.round_by(
            value, rounding.noise(5, 0, 0, row, DIM), dtype
        )
        # The sign of a NaN depends on the processor.
        sign = np.where(np.isnan(value), 0x7FFF, 0xFFFF)
        np.testing.assert_array_equal(found[row] & sign, wanted & sign)


@pytest.mark.parametrize("dtype", DTYPES)
def test_representable_values_are_not_changed(dtype):
    rng = np.random.default_rng(2)
    values = rounding.expand(
        rng.integers(0, 0x7800, [10, DIM]).astype(np.uint16), dtype
    )
    values[np.abs(values) < 1e-37] = 0
    embedding = embedding_of(dtype, rows=np.zeros_like(values))
    train(embedding, np.arange(10), -values)
    np.testing.assert_array_equal(
        rounding.expand(bits_of(embedding), dtype), values
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1 / 3, 1 + 2.0**-12, 1e-6])
def test_rounding_is_unbiased(dtype, value):
    values = np.full([500, 64], value, np.float32)
    embedding = embedding_of(dtype, rows=np.zeros_like(values))
    train(embedding, np.arange(500), -values)
    found = rounding.expand(bits_of(embedding), dtype)
    below, above = found.min(), found.max()
    assert below < values[0, 0] < above
    share = (found == above).mean()
    wanted = (values[0, 0] - below) / (above - below)
    # The bound is five standard deviations of the binomial distribution.
    error = 5 * np.sqrt(wanted * (1 - wanted) / values.size)
    assert abs(share - wanted) < error
    # The share of values that are rounded up must not depend on the row or the
    # column.
    for axis in (0, 1):
        means = (found == above).mean(axis=axis)
        assert means.std() < 1.5 * np.sqrt(
            wanted * (1 - wanted) / values.shape[axis]
        )


def test_updates_below_the_precision_accumulate_on_average():
    rows = np.ones([50, 64], np.float32)
    embedding = embedding_of("bfloat16", rows=rows)
    for _ in range(64):
        # The update is 1/32 of the distance to the next smaller bfloat16.
        train(embedding, np.arange(50), np.full([50, 64], 2.0**-13))
    found = rounding.expand(bits_of(embedding), "bfloat16")
    assert abs(found.mean() - (1 - 64 * 2.0**-13)) < 2e-4


RULES = {
    "SGD": tpu.SGD(0.3),
    "Adagrad": tpu.Adagrad(0.3),
    "AdagradMomentum": tpu.AdagradMomentum(0.3, momentum=0.5),
    "Adam": tpu.Adam(0.3),
    "Adam of all rows": tpu.Adam(0.3, lazy_adam=False),
    "FTRL": tpu.FTRL(0.3),
    "modified": tpu.Adagrad(
        0.3, clipvalue=0.4, weight_decay_factor=0.1, clip_weight_max=0.5
    ),
    "one by one": tpu.Adagrad(0.3, use_gradient_accumulation=False),
    "rowwise": tlm.optimizers.RowwiseAdagrad(0.3),
    "LAMB": tlm.optimizers.LAMB(0.3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_equals_a_float32_step_rounded_once(rule, dtype):
    rng = np.random.default_rng(3)
    start = rounding.expand(
        tf.cast(rng.normal(size=[NUM_ROWS, DIM]), dtype)
        .numpy()
        .view(np.uint16),
        dtype,
    )
    half = embedding_of(dtype, rows=start, optimizer=RULES[rule])
    full = embedding_of(None, rows=start, optimizer=RULES[rule])
    half.build()
    [rows] = full.embedding_tables.values()
    for step in range(3):
        ids = rng.integers(0, NUM_ROWS, 4)
        gradient = rng.normal(size=[4, DIM])
        for embedding in (half, full):
            train(embedding, ids, gradient)
        moved = (
            range(NUM_ROWS) if rule == "Adam of all rows" else set(ids.tolist())
        )
        wanted = tf.cast(rows, dtype).numpy().view(np.uint16)
        for row in moved:
            wanted[row] = rounding.round_by(
                rows.numpy()[row], rounding.noise(5, 0, step, row, DIM), dtype
            )
        np.testing.assert_array_equal(bits_of(half), wanted)
        rows.assign(rounding.expand(wanted, dtype))
    for one, two in zip(
        *(
            next(iter(embedding.slot_variables.values())).values()
            for embedding in (half, full)
        )
    ):
        assert one.dtype == tf.float32
        np.testing.assert_array_equal(one, two)


def trained_bits(dtype, num_steps=4, **options):
    embedding = embedding_of(dtype, optimizer=tpu.Adagrad(0.1), **options)
    rng = np.random.default_rng(4)
    for _ in range(num_steps):
        train(
            embedding, rng.integers(0, NUM_ROWS, 8), rng.normal(size=[8, DIM])
        )
    return bits_of(embedding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_and_replicas_do_not_change_any_bit(dtype):
    expected = trained_bits(dtype)
    np.testing.assert_array_equal(trained_bits(dtype, num_shards=3), expected)
    two = strategies.mirrored(2)
    embedding = embedding_of(dtype, optimizer=tpu.Adagrad(0.1), strategy=two)
    rng = np.random.default_rng(4)

    def step(ids, gradient):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        part = slice(replica * 4, replica * 4 + 4)
        embedding.enqueue(ids[part])
        embedding.dequeue()
        embedding.apply_gradients(gradient[part])

    step = tf.function(lambda *args, run=step: two.run(run, args))
    for _ in range(4):
        step(
            tf.constant(rng.integers(0, NUM_ROWS, 8)),
            tf.constant(rng.normal(size=[8, DIM]), tf.float32),
        )
    np.testing.assert_array_equal(bits_of(embedding), expected)


def test_the_seed_determines_the_rounding():
    one, same, other = (
        trained_bits("bfloat16", seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert np.mean(one != other) > 0.2


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_from_a_checkpoint_is_bitwise_equal(dtype, tmp_path):
    rng = np.random.default_rng(6)
    steps = [
        (rng.integers(0, NUM_ROWS, 4), rng.normal(size=[4, DIM]))
        for _ in range(6)
    ]
    first = embedding_of(dtype, optimizer=tpu.Adagrad(0.1))
    for step in steps[:3]:
        train(first, *step)
    path = tf.train.Checkpoint(embedding=first).save(tmp_path / "ckpt")
    second = embedding_of(dtype, optimizer=tpu.Adagrad(0.1), num_shards=2)
    second.build()
    tf.train.Checkpoint(embedding=second).read(
        path
    ).assert_existing_objects_matched()
    for step in steps[3:]:
        train(first, *step)
        train(second, *step)
    np.testing.assert_array_equal(bits_of(first), bits_of(second))


def test_a_checkpoint_of_another_dtype_raises(tmp_path):
    full = embedding_of(None)
    full.build()
    path = tf.train.Checkpoint(embedding=full).save(tmp_path / "ckpt")
    half = embedding_of("bfloat16")
    half.build()
    with pytest.raises(ValueError, match="'words'.*of dtype bfloat16.*float32"):
        tf.train.Checkpoint(embedding=half).restore(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_serving_and_export_equal_dequeue(dtype, tmp_path):
    rows = (
        np.random.default_rng(7).normal(size=[NUM_ROWS, DIM]).astype(np.float32)
    )
    embedding = embedding_of(dtype, rows=rows, num_shards=2)
    ids = tf.ragged.constant([[1, 2, 2], [], [6]], dtype=tf.int64)
    embedding.enqueue(ids, training=False)
    wanted = embedding.dequeue()
    assert wanted.dtype == tf.float32
    stored = rounding.expand(bits_of(embedding), dtype)
    np.testing.assert_array_equal(wanted[2], stored[6])
    np.testing.assert_array_equal(wanted[0], stored[1] + stored[2] + stored[2])
    np.testing.assert_array_equal(embedding(ids), wanted)

    module = tf.Module()
    module.embedding = embedding
    module.serve = tf.function(
        lambda ids: embedding(ids),
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)],
    )
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded.serve(ids), wanted)


def test_dtypes_are_per_table_and_halve_the_bytes():
    configs = {
        name: tpu.FeatureConfig(
            tpu.TableConfig(10, 4, tf.ones, combiner="sum", name=name)
        )
        for name in "abc"
    }
    embedding = tlm.TPUEmbedding(
        configs,
        tpu.Adagrad(0.1),
        table_dtypes={"a": "bfloat16", configs["c"].table: tf.float16},
    )
    embedding.enqueue({name: tf.constant([1]) for name in "abc"})
    embedding.apply_gradients(embedding.dequeue())
    tables = embedding.stats()["tables"]
    assert [tables[name]["num_bytes"] for name in "abc"] == [80, 160, 80]
    assert [tables[name]["num_slot_bytes"] for name in "abc"] == [160] * 3
    assert [one.dtype for one in embedding.embedding_tables.values()] == [
        tf.bfloat16,
        tf.float32,
        tf.float16,
    ]


def test_pipelined_updates_round_like_others():
    plain = trained_bits("bfloat16", num_steps=1)
    pipelined = trained_bits(
        "bfloat16", num_steps=1, pipeline_execution_with_tensor_core=True
    )
    np.testing.assert_array_equal(plain, pipelined)


@pytest.mark.parametrize(
    "dtypes, words",
    [
        ("float64", "`table_dtypes` must hold one of.*'float64'"),
        ({"words": "int8"}, r"'int8' \(table 'words'\)"),
        ({"other": "bfloat16"}, r"must name tables.*\['words'\].*'other'"),
        (3, "Received: 3"),
    ],
)
def test_invalid_table_dtypes_raise(dtypes, words):
    with pytest.raises(ValueError, match=words):
        embedding_of(dtypes)


def test_initial_values_out_of_range_raise():
    rows = np.full([NUM_ROWS, DIM], 1e5, np.float32)
    with pytest.raises(ValueError, match="65504.0 in magnitude.*100000.*words"):
        embedding_of("float16", rows=rows).build()
    embedding_of("bfloat16", rows=rows).build()


@pytest.mark.parametrize("seed", [1.0, "1", 2**63])
def test_invalid_rounding_seed_raises(seed):
    with pytest.raises(ValueError, match="`rounding_seed`"):
        embedding_of("bfloat16", seed=seed)
