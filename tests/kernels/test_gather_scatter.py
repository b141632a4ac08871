"""GatherRows and ScatterRows match numpy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import cases
from tf_layoutmap._core import ops

REFERENCES = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
    # TensorFlow rounds integer quotients towards zero, unlike numpy.
    "div": None,
    "update": lambda table, ids, values: table.__setitem__(ids, values),
}
NUMBERS = (
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
    tf.complex64,
    tf.complex128,
)
OTHERS = (tf.bool, tf.string)


def draw_table(dtype, num_rows, row_shape, seed):
    """Returns small integers, so that sums and products are exact."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 6, (num_rows, *row_shape))
    if dtype == tf.string:
        return values.astype("S").astype(object)
    if dtype == tf.bool:
        return values % 2 == 0
    return values.astype(dtype.as_numpy_dtype)


def divide_at(table, ids, values):
    values = np.broadcast_to(values, ids.shape + table.shape[1:])
    flat = values.reshape(-1, *table.shape[1:])
    for row, value in zip(ids.reshape(-1), flat):
        if table.dtype.kind in "iu":
            table[row] = np.trunc(table[row] / value).astype(table.dtype)
        else:
            table[row] = table[row] / value


def gather(variables, sharding, ids, dtype):
    return ops.gather_rows(
        shards=cases.handles(variables),
        ids=ids,
        dtype=dtype,
        table="ads",
        **sharding.attrs(),
    )


def scatter(variables, sharding, ids, updates, verb):
    ops.scatter_rows(
        shards=cases.handles(variables),
        ids=ids,
        updates=updates,
        verb=verb,
        table="ads",
        **sharding.attrs(),
    )


@settings(max_examples=120)
@given(
    cases.shardings(),
    st.sampled_from(NUMBERS + OTHERS),
    st.sampled_from(cases.ID_TYPES),
    st.sampled_from([(), (1,), (3,), (2, 5)]),
    st.sampled_from([(), (0,), (7,), (2, 3), (0, 4)]),
    st.integers(0, 99),
)
def test_rows_are_returned_in_the_order_of_ids(
    sharding, dtype, id_type, row_shape, ids_shape, seed
):
    table = draw_table(dtype, sharding.num_rows, row_shape, seed)
    ids = (
        np.random.default_rng(seed)
        .integers(0, sharding.num_rows, ids_shape)
        .astype(id_type)
    )
    rows = gather(cases.shard_variables(table, sharding), sharding, ids, dtype)
    assert rows.shape == (*ids_shape, *row_shape)
    np.testing.assert_array_equal(rows.numpy(), table[ids])


@settings(max_examples=250)
@given(
    cases.shardings(),
    st.sampled_from(NUMBERS),
    st.sampled_from(list(REFERENCES)),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from([(6,), (2, 2)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_verb_equals_numpy(
    sharding, dtype, verb, row_shape, ids_shape, is_scalar, seed
):
    if dtype.is_complex and verb in ("min", "max"):
        return
    ref = draw_table(dtype, sharding.num_rows, row_shape, seed)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, sharding.num_rows, ids_shape)
    # Division by powers of two is exact. The factors 1 and 2 do not overflow
    # int8.
    choices = [1, 2] if verb in ("mul", "div") else [1, 2, 3]
    updates = rng.choice(
        choices, () if is_scalar else (*ids_shape, *row_shape)
    ).astype(dtype.as_numpy_dtype)
    if verb == "mul" and dtype.size == 1:
        updates = np.ones_like(updates)
    variables = cases.shard_variables(ref, sharding)
    scatter(variables, sharding, ids, updates, verb)
    (REFERENCES[verb] or divide_at)(ref, ids, updates)
    np.testing.assert_array_equal(cases.joined(variables, sharding), ref)


@settings(max_examples=30)
@given(
    cases.shardings(),
    st.sampled_from(OTHERS),
    st.booleans(),
    st.integers(0, 99),
)
def test_strings_and_bools_are_updated(sharding, dtype, is_scalar, seed):
    ref = draw_table(dtype, sharding.num_rows, (2,), seed)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, sharding.num_rows, 4)
    updates = draw_table(dtype, 4, (2,), seed + 1)
    updates = updates[0, 0] if is_scalar else updates
    variables = cases.shard_variables(ref, sharding)
    scatter(variables, sharding, ids, tf.constant(updates), "update")
    ref[ids] = updates
    np.testing.assert_array_equal(cases.joined(variables, sharding), ref)


@pytest.mark.parametrize(
    "dtype, verb",
    [
        *((dtype, verb) for dtype in OTHERS for verb in ("add", "min", "div")),
        (tf.complex64, "min"),
        (tf.complex128, "max"),
    ],
)
def test_verbs_not_supported_by_a_dtype_raise(dtype, verb):
    sharding = cases.Sharding("div", (0, 3, 5))
    variables = cases.shard_variables(draw_table(dtype, 5, (2,), 0), sharding)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"`scatter_{verb}` does not support dtype",
    ):
        scatter(variables, sharding, [1], tf.zeros([1, 2], dtype), verb)


@pytest.mark.parametrize("num_ids", [7, 5000])
@pytest.mark.parametrize("dim", [1, 64])
def test_equal_ids_are_applied_in_order(num_ids, dim):
    # Rounded sums and `update` depend on the order of the ids. The op uses
    # several threads for 5000 ids.
    sharding = cases.Sharding("mod", (0, 4, 7, 10))
    table = cases.floats(10, dim)
    ids = np.random.default_rng(1).integers(0, 10, num_ids)
    updates = cases.floats(num_ids, dim, seed=2)
    for verb in ("add", "update"):
        ref = table.copy()
        REFERENCES[verb](ref, ids, updates)
        variables = cases.shard_variables(table, sharding)
        scatter(variables, sharding, ids, updates, verb)
        cases.assert_bitwise_equal(cases.joined(variables, sharding), ref)


@pytest.mark.parametrize("bad_id", [-1, 10, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("id_type", cases.ID_TYPES)
@pytest.mark.parametrize("num_ids", [3, 3000])
def test_an_invalid_id_raises_and_nothing_is_written(bad_id, id_type, num_ids):
    sharding = cases.Sharding("offsets", (0, 1, 1, 10))
    table = cases.floats(10, 2)
    variables = cases.shard_variables(table, sharding)
    ids = np.zeros(num_ids, id_type)
    ids[-2] = bad_id
    words = (
        rf"Id {bad_id} \(ids\[{num_ids - 2}\]\) is outside table 'ads' "
        "with 10 rows"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        gather(variables, sharding, ids, tf.float32)
    for verb in REFERENCES:
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            scatter(
                variables,
                sharding,
                ids,
                np.ones((num_ids, 2), np.float32),
                verb,
            )
    cases.assert_bitwise_equal(cases.joined(variables, sharding), table)


def test_an_id_beyond_int32_is_not_truncated():
    sharding = cases.Sharding("div", (0, 5))
    variables = cases.shard_variables(cases.floats(5, 2), sharding)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"Id {2**32 + 1} "
    ):
        gather(variables, sharding, np.array([2**32 + 1]), tf.float32)


@pytest.mark.parametrize("dtype", [tf.int8, tf.int32, tf.int64, tf.uint16])
def test_integer_division_by_zero_raises(dtype):
    sharding = cases.Sharding("div", (0, 3, 5))
    table = draw_table(dtype, 5, (2,), 0)
    variables = cases.shard_variables(table, sharding)
    updates = tf.constant([[1, 1], [1, 0]], dtype)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="needs updates without 0 .*'ads'"
    ):
        scatter(variables, sharding, [0, 4], updates, "div")
    np.testing.assert_array_equal(cases.joined(variables, sharding), table)


@pytest.mark.parametrize("dtype", [tf.int8, tf.int32, tf.int64])
def test_an_overflowing_quotient_wraps(dtype):
    sharding = cases.Sharding("div", (0, 2))
    table = np.array([dtype.min, 6], dtype.as_numpy_dtype)
    variables = cases.shard_variables(table, sharding)
    scatter(variables, sharding, [0, 1], tf.constant([-1, -4], dtype), "div")
    assert cases.joined(variables, sharding).tolist() == [dtype.min, -1]


def test_a_value_read_before_a_scatter_does_not_change():
    sharding = cases.Sharding("div", (0, 3, 5))
    table = cases.floats(5, 2)
    variables = cases.shard_variables(table, sharding)
    held = [variable.read_value() for variable in variables]
    scatter(variables, sharding, [0, 4], np.ones((2, 2), np.float32), "add")
    cases.assert_bitwise_equal(np.concatenate(held), table)
    assert (cases.joined(variables, sharding) != table).any(
        axis=1
    ).tolist() == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_mismatched_shapes_and_dtypes_raise():
    sharding = cases.Sharding("div", (0, 3, 5))
    variables = cases.shard_variables(cases.floats(5, 2), sharding)
    for updates in (np.ones((2, 3)), np.ones((3, 2)), np.ones(2)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="'ads' must be a scalar or"
        ):
            scatter(
                variables, sharding, [0, 1], updates.astype(np.float32), "add"
            )
    with pytest.raises(tf.errors.InvalidArgumentError, match="'ads': shard 0"):
        gather(variables, sharding, [0], tf.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="variable twice"):
        scatter(
            [variables[0]] * 2,
            cases.Sharding("div", (0, 3, 6)),
            [0],
            np.float32(1),
            "add",
        )


def test_the_static_shape_of_gathered_rows_is_inferred():
    sharding = cases.Sharding("div", (0, 3, 5))
    variables = cases.shard_variables(np.ones((5, 2, 3), np.float32), sharding)
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.int32)])
    def read(ids):
        shapes.append(
            gather(variables, sharding, ids, tf.float32).shape.as_list()
        )

    read(np.zeros((1, 4), np.int32))
    assert shapes == [[None, 4, 2, 3]]


@pytest.mark.exhaustive
@settings(max_examples=40)
@given(
    cases.shardings(),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from([(5,), (2, 3), (0,)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_gradient_of_gather_matches_tf_gather(
    sharding, row_shape, ids_shape, is_traced, seed
):
    table = draw_table(tf.float32, sharding.num_rows, row_shape, seed)
    variables = cases.shard_variables(table, sharding)
    one = tf.Variable(table)
    ids = np.random.default_rng(seed).integers(0, sharding.num_rows, ids_shape)
    factors = draw_table(tf.float32, 1, (*ids_shape, *row_shape), seed)[0]

    def gradients():
        handles = cases.handles(variables)
        with tf.GradientTape() as tape:
            tape.watch(handles)
            rows = gather(variables, sharding, ids, tf.float32)
            total = tf.reduce_sum(rows**2 * factors)
        return [tf.convert_to_tensor(g) for g in tape.gradient(total, handles)]

    found = (tf.function(gradients) if is_traced else gradients)()
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.gather(one, ids) ** 2 * factors)
    wanted = tf.convert_to_tensor(tape.gradient(total, one)).numpy()
    for gradient, part in zip(found, cases.shard_variables(wanted, sharding)):
        np.testing.assert_array_equal(gradient, part)
