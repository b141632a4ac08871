"""LookupRows and ApplyRowGradients match references in numpy."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tests.reference import apply, lookup, unique_rows
from tf_layoutmap._core import ops

Failures = (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError)


def look_up(variables, sharding, ids, row_splits, gains, **attrs):
    return ops.lookup_rows(
        shards=cases.handles(variables),
        ids=ids,
        row_splits=row_splits,
        gains=gains,
        dim=variables[0].shape[1],
        **sharding.attrs(),
        **attrs,
    )


def in_graph(call, *tensors):
    """Calls a function in a `tf.function` with unknown sizes."""
    signature = [
        tf.TensorSpec([None] * np.ndim(t), np.asarray(t).dtype) for t in tensors
    ]
    return tf.function(call, input_signature=signature)(*tensors)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("dim", cases.DIMS)
@given(sharding=cases.shardings(), data=st.data())
def test_lookup_is_bitwise_identical_to_the_reference(dim, sharding, data):
    table = cases.floats(sharding.num_rows, dim)
    ids, row_splits = data.draw(cases.ragged(sharding.num_rows))
    gains = cases.floats(len(ids), seed=1)
    cases.assert_bitwise_equal(
        look_up(
            cases.shard_variables(table, sharding),
            sharding,
            ids,
            row_splits,
            gains,
        ),
        lookup.lookup_rows(table, ids, row_splits, gains),
    )


@pytest.mark.parametrize("dtype", cases.ID_TYPES)
@pytest.mark.parametrize("placement", ["div", "mod"])
@pytest.mark.parametrize("dim", cases.DIMS)
def test_lookup_works_in_a_function(dim, placement, dtype):
    sharding = cases.Sharding(placement, (0, 4, 7, 10))
    table = cases.floats(10, dim)
    variables = cases.shard_variables(table, sharding)
    ids = np.array([9, 0, 3, 4, 9, 9, 7], dtype)
    row_splits = np.array([0, 0, 3, 6, 7])
    gains = cases.floats(7, seed=1)

    def call(ids, row_splits, gains):
        found = look_up(variables, sharding, ids, row_splits, gains)
        assert found.shape.as_list() == [None, dim]
        return found

    cases.assert_bitwise_equal(
        in_graph(call, ids, row_splits, gains),
        lookup.lookup_rows(table, ids, row_splits, gains),
    )


def test_lookup_without_ids_returns_zeros():
    empty = cases.Sharding("div", (0, 0, 0))
    variables = cases.shard_variables(np.zeros([0, 3], np.float32), empty)
    none = np.zeros(0, np.float32)
    for num_samples in (0, 1, 5):
        cases.assert_bitwise_equal(
            look_up(
                variables,
                empty,
                np.zeros(0, np.int32),
                np.zeros(num_samples + 1, np.int64),
                none,
            ),
            np.zeros([num_samples, 3], np.float32),
        )


def test_a_large_batch_and_a_long_sample_match_the_reference():
    sharding = cases.Sharding("mod", (0, 251, 501, 751, 1001))
    table = cases.floats(1001, 16)
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 6, 3000)
    sizes[7] = 20_000
    row_splits = np.concatenate([[0], np.cumsum(sizes)])
    ids = rng.integers(0, 1001, row_splits[-1])
    gains = cases.floats(len(ids), seed=1)
    cases.assert_bitwise_equal(
        look_up(
            cases.shard_variables(table, sharding),
            sharding,
            ids,
            row_splits,
            gains,
        ),
        lookup.lookup_rows(table, ids, row_splits, gains),
    )


# Hyperparameters after the learning rate.
CONSTANTS = {
    "adam": [0.9, 0.99, 1e-3, 0, 1],
    "adam_per_id": [0.9, 0.99, 1e-3, 0, 1],
    "momentum": [0.9, 1],
    "rmsprop": [0.9, 1e-3],
    "rmsprop_per_id": [0.9, 1e-3],
}
NUM_SLOTS = {"sgd": 0, "adam": 2, "adam_per_id": 2}
OPTIMIZERS = ["sgd", "adagrad", "adagrad_per_id", *CONSTANTS]


class Problem:
    """A table, its accumulators and a batch of gradients."""

    def __init__(
        self, sharding, ids, row_splits, *, optimizer="adagrad", dim=3, rate=0.3
    ):
        self.sharding, self.optimizer = sharding, optimizer
        self.table = cases.floats(sharding.num_rows, dim)
        self.slots = [
            # The values of slot variables must be positive.
            1.5 + cases.floats(sharding.num_rows, dim, seed=1 + slot)
            for slot in range(NUM_SLOTS.get(optimizer, 1))
        ]
        self.variables = cases.shard_variables(self.table, sharding)
        self.slot_variables = [
            variable
            for slot in self.slots
            for variable in cases.shard_variables(slot, sharding)
        ]
        gains, rows, splits, positions = unique_rows.find_unique_rows(
            ids, row_splits, 1 + cases.floats(len(ids), seed=2), "mean"
        )
        self.inputs = {
            "unique_rows": rows,
            "unique_splits": splits,
            "positions": positions,
            "row_splits": row_splits,
            "gains": gains,
            "gradients": cases.floats(len(row_splits) - 1, dim, seed=3),
        }
        self.rate = np.array([rate, *CONSTANTS.get(optimizer, [])], np.float32)

    def op(self, **changes):
        arguments = {
            "shards": cases.handles(self.variables),
            "slots": cases.handles(self.slot_variables),
            "optimizer": self.optimizer,
            "hyperparameters": self.rate,
            "table": "ads",
            **self.sharding.attrs(),
            **self.inputs,
            **changes,
        }
        return ops.apply_row_gradients(**arguments)

    def ref(self):
        apply.apply_row_gradients(
            self.table,
            self.slots,
            **self.inputs,
            optimizer=self.optimizer,
            hyperparameters=self.rate,
        )

    def check(self):
        variables = [self.variables] + [
            self.slot_variables[j * self.sharding.num_shards :][
                : self.sharding.num_shards
            ]
            for j in range(len(self.slots))
        ]
        for found, expected in zip(
            variables, [self.table, *self.slots], strict=True
        ):
            cases.assert_bitwise_equal(
                cases.joined(found, self.sharding), expected
            )

    def values(self):
        return [one.numpy() for one in self.variables + self.slot_variables]


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dim", cases.DIMS)
@given(sharding=cases.shardings(), data=st.data())
def test_apply_is_bitwise_identical_to_the_reference(
    dim, optimizer, sharding, data
):
    ids, row_splits = data.draw(cases.ragged(sharding.num_rows))
    problem = Problem(sharding, ids, row_splits, optimizer=optimizer, dim=dim)
    problem.op()
    problem.ref()
    problem.check()


def small_problem(dtype=np.int64, **options):
    return Problem(
        cases.Sharding("div", (0, 4, 7, 10)),
        np.array([9, 0, 3, 9, 9, 7], dtype),
        np.array([0, 0, 3, 5, 6]),
        **options,
    )


@pytest.mark.parametrize("dtype", cases.ID_TYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_apply_works_in_a_function(optimizer, dtype):
    problem = small_problem(dtype, optimizer=optimizer)
    names = list(problem.inputs)

    def call(*tensors):
        problem.op(**dict(zip(names, tensors, strict=True)))

    in_graph(call, *problem.inputs.values())
    problem.ref()
    problem.check()


def test_apply_accepts_the_outputs_of_the_other_ops():
    sharding = cases.Sharding("mod", (0, 4, 7, 10))
    ids, row_splits = np.array([9, 0, 3, 9, 9, 7]), np.array([0, 0, 3, 5, 6])
    problem = Problem(sharding, ids, row_splits)
    found = ops.find_unique_rows(
        ids,
        row_splits,
        1 + cases.floats(6, seed=2),
        combiner="mean",
        num_rows=10,
    )
    problem.op(**found._asdict())
    problem.ref()
    problem.check()


def test_a_value_read_before_an_update_does_not_change():
    problem = small_problem()
    held = [
        one.read_value() for one in problem.variables + problem.slot_variables
    ]
    before = [value.numpy().copy() for value in held]
    views = [value.numpy() for value in held]
    problem.op()
    problem.ref()
    problem.check()
    for value, view, expected in zip(held, views, before, strict=True):
        cases.assert_bitwise_equal(value, expected)
        cases.assert_bitwise_equal(view, expected)


def test_a_value_read_before_an_update_in_a_function_does_not_change():
    problem = small_problem()

    @tf.function
    def step():
        held = [tf.identity(one.read_value()) for one in problem.variables]
        with tf.control_dependencies(held):
            problem.op()
        return held

    before = [one.numpy().copy() for one in problem.variables]
    for value, expected in zip(step(), before, strict=True):
        cases.assert_bitwise_equal(value, expected)
    problem.ref()
    problem.check()


BAD_APPLY = {
    "a row outside": ({"unique_rows": np.array([0, 3, 7, 10])}, "10 rows"),
    "a negative row": ({"unique_rows": np.array([-1, 3, 7, 9])}, "10 rows"),
    "rows unordered": ({"unique_rows": np.array([3, 0, 7, 9])}, "outputs of"),
    "rows twice": ({"unique_rows": np.array([0, 0, 7, 9])}, "outputs of"),
    "too few splits": ({"unique_splits": np.array([0, 1, 2, 6])}, "outputs of"),
    "no splits": ({"unique_splits": np.zeros(0, np.int64)}, "outputs of"),
    "splits that fall": (
        {"unique_splits": np.array([0, 2, 1, 3, 6])},
        "outputs of",
    ),
    "splits too long": (
        {"unique_splits": np.array([0, 1, 2, 3, 7])},
        "outputs of",
    ),
    "a position outside": (
        {"positions": np.array([1, 2, 5, 0, 3, 6], np.int32)},
        "outputs of",
    ),
    "a negative position": (
        {"positions": np.array([1, 2, 5, 0, 3, -1], np.int32)},
        "outputs of",
    ),
    "row_splits too short": ({"row_splits": np.array([0, 3, 6])}, "row_splits"),
    "row_splits that fall": (
        {"row_splits": np.array([0, 4, 3, 5, 6])},
        "row_splits",
    ),
    "row_splits beyond": (
        {"row_splits": np.array([0, 0, 3, 5, 7])},
        "row_splits",
    ),
    "too few gains": ({"gains": np.ones(5, np.float32)}, "one value per id"),
    "gradients of a vector": (
        {"gradients": np.ones(12, np.float32)},
        "`gradients` must have rank 2",
    ),
    "another dim": (
        {"gradients": np.ones([4, 2], np.float32)},
        r"shard 0 must be float \[4,2\]. Received: float \[4,3\]",
    ),
    "too few gradients": (
        {"gradients": np.ones([3, 3], np.float32)},
        "3 gradient rows",
    ),
    "rate of nan": (
        {"hyperparameters": [np.nan]},
        "Table 'ads': the learning rate must be finite",
    ),
    "negative rate": ({"hyperparameters": [-0.1]}, "at least 0"),
    "no rate": (
        {"hyperparameters": np.zeros(0, np.float32)},
        "takes 1 hyperparam",
    ),
    "a rate of rank 0": (
        {"hyperparameters": 0.1},
        "`hyperparameters` must have rank 1",
    ),
    "two rates": ({"hyperparameters": [0.1, 0.1]}, "Received: 2"),
    "offsets of another table": (
        {"offsets": np.array([0, 3, 7, 10]), "placement": "offsets"},
        r"shard 0 must be float \[3,3\]. Received: float \[4,3\]",
    ),
    "a rank of 2": ({"positions": np.zeros([2, 3], np.int32)}, "rank 1"),
}


@pytest.mark.parametrize("case", BAD_APPLY)
def test_an_invalid_update_writes_nothing(case):
    changes, words = BAD_APPLY[case]
    problem = small_problem()
    before = problem.values()
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        problem.op(**changes)
    for found, expected in zip(problem.values(), before, strict=True):
        cases.assert_bitwise_equal(found, expected)


def invalid_variables():
    """Yields tuples of a case name, an invalid variable and expected words."""
    yield "dtype", tf.Variable(np.zeros([3, 3])), "float.*Received: double"
    yield "size", tf.Variable(np.zeros([4, 3], np.float32)), r"\[4,3\]"
    yield "dim", tf.Variable(np.zeros([3, 2], np.float32)), r"\[3,2\]"
    yield "rank", tf.Variable(np.zeros([9], np.float32)), r"\[9\]"


@pytest.mark.parametrize("place", ["shards", "slots"])
@pytest.mark.parametrize("case", list(invalid_variables()), ids=lambda c: c[0])
def test_an_invalid_shard_raises_and_nothing_is_written(case, place):
    _, variable, words = case
    problem = small_problem()
    before = problem.values()
    variables = {"shards": problem.variables, "slots": problem.slot_variables}[
        place
    ]
    # Only the last variable is invalid.
    changed = cases.handles([*variables[:2], variable])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"shard 2 must be.*{words}"
    ):
        problem.op(**{place: changed})
    if place == "shards":
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"shard 2 must be.*{words}"
        ):
            ops.lookup_rows(
                shards=changed,
                ids=[0],
                row_splits=[0, 1],
                gains=[1.0],
                dim=3,
                **problem.sharding.attrs(),
            )
    for found, expected in zip(problem.values(), before, strict=True):
        cases.assert_bitwise_equal(found, expected)


def uninitialized():
    return tf.raw_ops.VarHandleOp(
        dtype=tf.float32, shape=[3, 3], shared_name="never_assigned"
    )


@pytest.mark.parametrize("place", ["shards", "slots"])
def test_an_uninitialized_variable_raises_and_nothing_is_written(place):
    problem = small_problem()
    before = problem.values()
    variables = {"shards": problem.variables, "slots": problem.slot_variables}[
        place
    ]
    changed = [*cases.handles(variables[:2]), uninitialized()]
    words = rf"`{place}\[2\]`: variable 'never_assigned' is not initialized"
    with pytest.raises(tf.errors.FailedPreconditionError, match=words):
        problem.op(**{place: changed})
    if place == "shards":
        with pytest.raises(tf.errors.FailedPreconditionError, match=words):
            ops.lookup_rows(
                shards=changed,
                ids=[0],
                row_splits=[0, 1],
                gains=[1.0],
                dim=3,
                **problem.sharding.attrs(),
            )
    for found, expected in zip(problem.values(), before, strict=True):
        cases.assert_bitwise_equal(found, expected)


def test_a_wrong_number_of_shards_raises():
    problem = small_problem()
    shards = cases.handles(problem.variables)
    slots = cases.handles(problem.slot_variables)
    for bad in (shards[:2], shards + slots[:1]):
        with pytest.raises(
            Failures,
            match=f"needs 3 `shards`. Received: {len(bad)}|needs 3 shards",
        ):
            ops.lookup_rows(
                shards=bad,
                ids=[0],
                row_splits=[0, 1],
                gains=[1.0],
                dim=3,
                **problem.sharding.attrs(),
            )
    for changes in (
        {"shards": shards[:2]},
        {"slots": slots[:2]},
        {"slots": []},
        {"shards": shards + slots[:1], "slots": slots[1:]},
    ):
        with pytest.raises(Failures, match="needs 3 `s"):
            problem.op(**changes)


def test_passing_one_variable_twice_raises():
    problem = small_problem()
    shards = cases.handles(problem.variables)
    slots = cases.handles(problem.slot_variables)
    before = problem.values()
    for changes in (
        {"shards": [shards[0], shards[1], shards[1]]},
        {"slots": shards},
        {"slots": [slots[0], *shards[1:]]},
    ):
        with pytest.raises(Failures, match="the same variable twice"):
            problem.op(**changes)
    for found, expected in zip(problem.values(), before, strict=True):
        cases.assert_bitwise_equal(found, expected)


def test_invalid_handles_raise():
    problem = small_problem()
    shards = cases.handles(problem.variables)

    def look_up(bad):
        return ops.lookup_rows(
            shards=[*shards[:2], bad],
            ids=[0],
            row_splits=[0, 1],
            gains=[1.0],
            dim=3,
            **problem.sharding.attrs(),
        )

    @tf.function
    def of_a_stack(size):
        return look_up(tf.stack(cases.handles(problem.variables))[:size])

    for size in (0, 1, 3):
        # In eager mode, TensorFlow itself raises an error for an empty tensor
        # of handles.
        with pytest.raises(Failures, match="must have rank 0|Empty resource"):
            look_up(tf.stack(shards)[:size])
        with pytest.raises((*Failures, ValueError), match="rank 0"):
            of_a_stack(size)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    with pytest.raises(Failures):
        look_up(table.resource_handle)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"ids": [10]},
            "Feature 'clicked', sample 0: id 10 is outside table 'ads' "
            "with 10 rows",
        ),
        ({"ids": [-1]}, "id -1 is outside table 'ads' with 10 rows"),
        ({"ids": [[1]]}, "`ids` must have rank 1"),
        ({"row_splits": [0, 2]}, "row_splits must end with the number of ids"),
        ({"row_splits": [[0, 1]]}, "`row_splits` must have rank 1"),
        ({"row_splits": np.zeros(0, np.int64)}, "samples"),
        ({"gains": [1.0, 2.0]}, "`gains` must have one value per id"),
        ({"gains": [[1.0]]}, "`gains` must have one value per id"),
        ({"offsets": [[0, 4, 7, 10]]}, "`offsets` must have rank 1"),
        ({"dim": 2}, r"must be float \[4,2\]"),
        ({"dim": 2**62}, "overflow|must be float"),
    ],
)
def test_an_invalid_lookup_raises(changes, words):
    problem = small_problem()
    arguments = {
        "ids": [1],
        "row_splits": [0, 1],
        "gains": [1.0],
        "dim": 3,
        "feature": "clicked",
        "table": "ads",
        **problem.sharding.attrs(),
        **changes,
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.lookup_rows(shards=cases.handles(problem.variables), **arguments)


def test_a_lookup_whose_size_overflows_raises():
    variable = tf.Variable(tf.zeros([0, 2**62], tf.float32))
    with pytest.raises(Failures):
        ops.lookup_rows(
            shards=[variable.handle],
            ids=np.zeros(0, np.int64),
            row_splits=np.zeros(9, np.int64),
            gains=np.zeros(0, np.float32),
            dim=2**62,
            offsets=[0, 0],
            placement="div",
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": [[0, 4]]},
        {"ids": [[0]]},
        {"row_splits": [[0, 1]]},
        {"gains": [[1.0]]},
        {"row_splits": np.zeros(0, np.int64)},
        {"ids": np.zeros(2, np.int64)},
    ],
)
def test_a_lookup_with_wrong_shapes_raises_while_tracing(changes):
    variable = tf.Variable(tf.zeros([4, 3]))
    inputs = {
        "offsets": [0, 4],
        "ids": [0],
        "row_splits": [0, 1],
        "gains": [1.0],
        **changes,
    }

    @tf.function
    def trace():
        return ops.lookup_rows(
            shards=[variable.handle], placement="div", dim=3, **inputs
        )

    with pytest.raises(ValueError, match="hape|rank|Dimension"):
        trace.get_concrete_function()


@pytest.mark.parametrize(
    "name",
    [
        "offsets",
        "unique_rows",
        "unique_splits",
        "positions",
        "row_splits",
        "gains",
        "gradients",
        "hyperparameters",
    ],
)
def test_an_update_with_wrong_ranks_raises_while_tracing(name):
    problem = small_problem()
    inputs = {
        **problem.inputs,
        "hyperparameters": problem.rate,
        "offsets": np.array(problem.sharding.offsets),
    }
    trace = tf.function(
        functools.partial(problem.op, **{name: tf.expand_dims(inputs[name], 0)})
    )
    with pytest.raises(ValueError, match="must be rank"):
        trace.get_concrete_function()
