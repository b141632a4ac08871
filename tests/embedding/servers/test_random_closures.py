"""Random closures of several steps equal the same steps of one process.

The closures are traced as for a worker, and run in this process.
"""

import contextlib
from unittest import mock

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import setups as pairs
from tests.embedding.servers import local
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import tables
from tf_layoutmap.ps import step_closure

# Tables of the two embeddings of a step.
NAMES = (("ads", "few"), ("few",), ("words", "few"), ("deep", "wide"))
# The calls of a step. The numbers are indices of embeddings.
CALLS = ("train", "forward", "read", "forward_in_branch", "train_in_branch")


@contextlib.contextmanager
def traced_here(group_size):
    """Makes `StepClosure` trace for this process."""

    def trace(coordinator, function, *arguments):
        del coordinator
        return function.get_concrete_function(*arguments)

    with (
        mock.patch.object(tf_private, "trace_for_workers", trace),
        mock.patch.object(step_closure, "_MAX_GROUP", group_size),
    ):
        yield


@st.composite
def setups(draw, names):
    def by_name(values):
        return {name: draw(st.sampled_from(sorted(values))) for name in names}

    return pairs.Setup(
        names,
        draw(st.sampled_from([20, 200])),
        draw(st.sampled_from(sorted(pairs.POLICIES))),
        by_name(pairs.OPTIMIZERS),
        by_name(pairs.COMBINERS),
        by_name(pairs.DTYPES),
        (),
        "error",
    )


def create(setup, num_servers, num_shards):
    with local.servers(num_servers):
        return setup.create(None, num_shards)


def batches(setup, seed, num_steps):
    """Returns ragged ids of some steps for each feature."""
    rng = np.random.default_rng(seed)
    generator = pairs.Batches(setup)
    found = {}
    for feature, table in setup.features().items():
        lengths = rng.integers(0, 4, [num_steps, 5])
        ids = generator.ids(rng, table, lengths.sum())
        found[feature] = tf.RaggedTensor.from_nested_row_lengths(
            tf.constant(ids, tf.int64),
            [np.full([num_steps], 5), lengths.ravel()],
        )
    return found


def read_table(one, setup):
    """Returns all rows of the last table."""
    variable = one._variables[setup.names[-1]][tables.PARAMETERS]
    shards = [tf.identity(each) for each in tables.shards_of(variable)]
    return tf.cast(tf.concat(shards, axis=0), tf.float32)


def train(one, ids):
    one.enqueue(ids)
    found = one.dequeue()
    one.apply_gradients(pairs.gradients(found))
    return list(found.values())


def forward(one, ids):
    one.enqueue(ids, training=False)
    return list(one.dequeue().values())


def step_function(embeddings, setups, calls):
    """Returns a function that makes the calls of a step with a batch."""

    def make_call(kind, number, ids):
        one = embeddings[number]
        if kind == "read":
            return [read_table(one, setups[number])]
        function = train if kind.startswith("train") else forward
        if not kind.endswith("in_branch"):
            return function(one, ids)
        size = tf.size(next(iter(ids.values())).flat_values)
        zeros = [
            tf.zeros([5, pairs.DIMS[table]])
            for table in setups[number].features().values()
        ]
        return tf.cond(
            size % 2 == 0,
            lambda: [
                tf.ensure_shape(each, other.shape)
                for each, other in zip(function(one, ids), zeros)
            ],
            lambda: zeros,
        )

    def step(*batch):
        results = []
        for kind, number in calls:
            results.extend(make_call(kind, number, batch[number]))
        return tf.concat(
            [tf.cast(tf.reshape(one, [-1]), tf.float64) for one in results],
            axis=0,
        )

    return step


def may_run(calls):
    """Returns the calls without repeated training of an embedding."""
    trained, allowed = set(), []
    for kind, number in calls:
        if kind.startswith("train"):
            if number in trained:
                continue
            trained.add(number)
        allowed.append((kind, number))
    return allowed


def run_closures(servers, setups, calls, inputs, sizes, group_size, prefetch):
    """Runs closures, and returns the results of each closure."""
    step = step_function(servers, setups, calls)
    closure = step_closure.StepClosure(
        None,
        lambda iterator: step(*next(iterator)),
        sizes[0],
        prefetch_steps=prefetch,
        joins_results=True,
    )
    iterator = iter(tf.data.Dataset.from_tensor_slices(inputs))
    found, first = [], 0
    with traced_here(group_size):
        for size in sizes:
            numbers = np.stack(
                [np.ones([size], int), np.arange(first, first + size)], 1
            )
            traced = closure._trace(iterator, size)
            found.append(traced(iterator, tf.constant(numbers, tf.int64)))
            first += size
    return found


def check_equal(both, num_servers, num_shards, calls, sizes, group_size, seed):
    """Compares closures with single steps."""
    calls = may_run(calls)
    servers = [create(one, num_servers, num_shards) for one in both]
    host = [one.create(None, num_shards) for one in both]
    inputs = tuple(
        batches(one, seed + number, sum(sizes))
        for number, one in enumerate(both)
    )
    found = run_closures(servers, both, calls, inputs, sizes, group_size, 0)
    step = step_function(host, both, calls)
    expected = [
        step(*batch) for batch in tf.data.Dataset.from_tensor_slices(inputs)
    ]
    pairs.assert_same(tf.concat(found, 0), tf.concat(expected, 0))
    for one, other in zip(servers, host):
        pairs.assert_same(pairs.variables(one), pairs.variables(other))


@given(data=st.data())
@settings(max_examples=3)
def test_random_closures_equal_single_steps(data):
    names = [data.draw(st.sampled_from(NAMES)) for _ in range(2)]
    num_steps = data.draw(st.integers(1, 6))
    check_equal(
        [data.draw(setups(one)) for one in names],
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(
            st.lists(
                st.tuples(st.sampled_from(CALLS), st.integers(0, 1)),
                min_size=1,
                max_size=4,
            )
        ),
        [num_steps, 1, num_steps, data.draw(st.integers(1, 6))],
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(0, 1000)),
    )


class Missing:
    """An embedding of one process whose lookups may miss the last update."""

    def __init__(self, setup, num_shards):
        self.one = setup.create(None, num_shards)
        self._stale = None

    def begin_closure(self):
        """Begins a closure, which misses no update of earlier closures."""
        self._stale = None

    def lookups(self, ids):
        """Returns the activations with and without the last update."""
        fresh = list(self.one(ids).values())
        return [fresh] if self._stale is None else [fresh, self._stale]

    def update(self, ids, found, next_ids):
        """Applies the gradients that the activations `found` result in."""
        self._stale = None
        if next_ids is not None:
            self._stale = list(self.one(next_ids).values())
        self.one.enqueue(ids)
        names = self.one.dequeue().keys()
        self.one.apply_gradients(pairs.gradients(dict(zip(names, found))))


def split(vector, setups):
    """Returns the activations in the result of a step, for each embedding."""
    found, begin = [], 0
    for setup in setups:
        found.append([])
        for table in setup.features().values():
            size = 5 * pairs.DIMS[table]
            part = tf.cast(vector[begin : begin + size], tf.float32)
            found[-1].append(tf.reshape(part, [5, -1]))
            begin += size
    return found


def check_prefetched(both, num_servers, num_shards, sizes, group_size, seed):
    """Compares closures that prefetch rows with `Missing`.

    Returns:
      The number of lookups that missed an update which changed their rows.
    """
    servers = [create(one, num_servers, num_shards) for one in both]
    host = [Missing(one, num_shards) for one in both]
    inputs = tuple(
        batches(one, seed + number, sum(sizes))
        for number, one in enumerate(both)
    )
    calls = [("train", number) for number in range(len(both))]
    found = run_closures(servers, both, calls, inputs, sizes, group_size, 1)
    steps = list(tf.data.Dataset.from_tensor_slices(inputs))
    num_stale = 0
    for of_closure, size in zip(found, sizes):
        for one in host:
            one.begin_closure()
        for place, vector in enumerate(np.split(of_closure.numpy(), size)):
            batch = steps.pop(0)
            following = steps[0] if place + 1 < size else [None] * len(both)
            for number, activations in enumerate(split(vector, both)):
                options = host[number].lookups(batch[number])
                equal = [
                    all(map(np.array_equal, activations, one))
                    for one in options
                ]
                # The rows of each server may miss the update.
                assert any(equal) or num_servers > 1
                num_stale += not equal[0]
                host[number].update(
                    batch[number], activations, following[number]
                )
    for one, other in zip(servers, host):
        pairs.assert_same(pairs.variables(one), pairs.variables(other.one))
    return num_stale


@given(data=st.data())
@settings(max_examples=3)
def test_random_closures_with_prefetched_rows_miss_one_update(data):
    names = data.draw(
        st.lists(
            st.sampled_from([("ads", "few"), ("few",)]), min_size=1, max_size=2
        )
    )
    num_steps = data.draw(st.integers(2, 7))
    check_prefetched(
        [data.draw(setups(one)) for one in names],
        data.draw(st.sampled_from([1, 1, 2, 3])),
        data.draw(st.integers(1, 3)),
        [num_steps, 1, num_steps, data.draw(st.integers(1, 7))],
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(0, 1000)),
    )


def test_joined_calls_prefetch_rows_in_most_steps():
    setup = pairs.Setup(
        ("ads",), 20, "lru", {"ads": "sgd"}, {"ads": "sum"},
        {"ads": "float32"}, (), "error",
    )  # fmt: skip
    assert check_prefetched([setup], 1, 1, [7, 7], 8, 0) >= 8
