"""The host engine's ops match a list-based reference."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tests.reference import host_engine as ref
from tf_layoutmap._core import ops

InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError

CUTS = [cases.Sharding("div", (0, 4, 7)), cases.Sharding("mod", (0, 2, 4, 5))]
DIMS = [3, 16]
OPTIMIZERS = ["adagrad", "sgd"]
FEATURES = [
    ref.Feature("clicked", 0, "mean"),
    ref.Feature("text", 1, "sum", max_sequence_length=2),
    ref.Feature("shown", 0, "sqrtn"),
    ref.Feature("bag", 1, "sum"),
]
HYPERPARAMETERS = [np.array([0.3], np.float32), np.array([0.5], np.float32)]


def attrs(**changes) -> dict:
    return {
        "num_replicas": 1,
        "max_pending_steps": 2,
        "table_names": ["ads", "words"],
        "table_num_rows": [sharding.num_rows for sharding in CUTS],
        "table_dims": DIMS,
        "table_num_shards": [sharding.num_shards for sharding in CUTS],
        "table_placements": [sharding.placement for sharding in CUTS],
        "table_offsets": [o for sharding in CUTS for o in sharding.offsets],
        "table_optimizers": OPTIMIZERS,
        "feature_names": [one.name for one in FEATURES],
        "feature_tables": [one.table for one in FEATURES],
        "feature_combiners": [one.combiner for one in FEATURES],
        "feature_max_sequence_lengths": [
            one.max_sequence_length for one in FEATURES
        ],
        **changes,
    }


class Engine:
    """The engine's ops and a reference that receives the same calls."""

    def __init__(self, num_replicas=1, **changes):
        self.handle = ops.create_host_engine(
            **attrs(num_replicas=num_replicas, **changes)
        )
        tables, self.shards, self.slots = [], [], []
        for t, sharding in enumerate(CUTS):
            rows = cases.floats(sharding.num_rows, DIMS[t], seed=t)
            slots = (
                [np.full_like(rows, 0.5)] if OPTIMIZERS[t] == "adagrad" else []
            )
            self.shards += cases.shard_variables(rows, sharding)
            for slot in slots:
                self.slots += cases.shard_variables(slot, sharding)
            tables.append(ref.Table(rows, OPTIMIZERS[t], slots))
        self.ref = ref.HostEngine(
            tables, FEATURES, num_replicas=num_replicas, max_pending_steps=2
        )

    def enqueue(self, replica, inputs, training=True):
        return ops.enqueue_step(
            engine=self.handle, replica=replica, training=training, **inputs
        )

    def dequeue(self, replica, **changes):
        return ops.dequeue_step(
            **{
                "engine": self.handle,
                "replica": replica,
                "shards": cases.handles(self.shards),
                "num_features": len(FEATURES),
                "dims": [DIMS[one.table] for one in FEATURES],
                "max_sequence_lengths": [
                    one.max_sequence_length for one in FEATURES
                ],
                **changes,
            }
        )

    def apply(self, replica, gradients, **changes):
        return ops.apply_step(
            **{
                "engine": self.handle,
                "replica": replica,
                "gradients": gradients,
                "hyperparameters": HYPERPARAMETERS,
                "shards": cases.handles(self.shards),
                "slots": cases.handles(self.slots),
                "rounding_steps": [],
                **changes,
            }
        )

    def describe(self):
        found = ops.describe_host_engine(self.handle)
        return (
            found.pending.numpy().tolist(),
            found.awaiting.numpy().tolist(),
            int(found.num_updates),
            bool(found.poisoned.numpy()),
        )

    def values(self):
        return [one.numpy() for one in self.shards + self.slots]

    def check(self):
        """Checks that the ops and the reference have equal state."""
        model = self.ref
        assert self.describe() == (
            [model.pending(r) for r in range(model.num_replicas)],
            model.awaiting,
            model.num_updates,
            model.poisoned,
        )
        first = first_slot = 0
        for table, sharding in zip(model.tables, CUTS, strict=True):
            cases.assert_bitwise_equal(
                cases.joined(
                    self.shards[first : first + sharding.num_shards], sharding
                ),
                table.rows,
            )
            for slot in table.slots:
                variables = self.slots[
                    first_slot : first_slot + sharding.num_shards
                ]
                cases.assert_bitwise_equal(
                    cases.joined(variables, sharding), slot
                )
                first_slot += sharding.num_shards
            first += sharding.num_shards


def random_batch(seed, num_samples=3):
    """Returns a list of (id, weight) for each feature and sample."""
    rng = np.random.default_rng(seed)
    batch = []
    for feature in FEATURES:
        weighted = not feature.max_sequence_length and rng.integers(2)
        batch.append(
            [
                [
                    (
                        int(rng.integers(CUTS[feature.table].num_rows)),
                        float(rng.integers(1, 5)) if weighted else 1.0,
                    )
                    for _ in range(rng.integers(4))
                ]
                for _ in range(num_samples)
            ]
        )
    return batch


def inputs_of(batch, dtype=np.int64, form="ragged"):
    """Returns the inputs of the op in the form `form` (see docs/ops.md)."""
    inputs = {
        "ids": [],
        "splits": [],
        "weights": [],
        "num_samples": np.array([len(one) for one in batch], np.int64),
    }
    for samples in batch:
        flat = [pair for sample in samples for pair in sample]
        inputs["ids"].append(np.array([row for row, _ in flat], dtype))
        weights = np.array([weight for _, weight in flat], np.float32)
        inputs["weights"].append(
            weights if (weights != 1).any() else weights[:0]
        )
        splits = np.cumsum([0] + [len(sample) for sample in samples])
        if form == "sparse":
            splits = np.array(
                [
                    (s, i)
                    for s, sample in enumerate(samples)
                    for i in range(len(sample))
                ],
                np.int64,
            ).reshape(-1, 2)
        elif form == "dense":
            splits = np.zeros(0, np.int64)
        inputs["splits"].append(splits)
    return inputs


def random_gradients(seed, num_samples=3):
    shapes = [
        [
            num_samples,
            *([one.max_sequence_length] * bool(one.max_sequence_length)),
            DIMS[one.table],
        ]
        for one in FEATURES
    ]
    return [
        cases.floats(*shape, seed=seed * 10 + f)
        for f, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("dtype", cases.ID_TYPES)
@pytest.mark.parametrize("form", ["ragged", "sparse", "dense"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_training_is_bitwise_identical_to_the_reference(
    num_replicas, form, dtype
):
    engine = Engine(num_replicas)
    for step in range(5):
        batches = [random_batch(step * 10 + r) for r in range(num_replicas)]
        if form == "dense":
            # All samples of a dense input must have the same number of ids,
            # which is two in this test.
            batches = [
                [
                    [
                        (sample * 2 + [(0, 1.0), (1, 1.0)])[:2]
                        for sample in samples
                    ]
                    for samples in batch
                ]
                for batch in batches
            ]
        for r, batch in enumerate(batches):
            engine.enqueue(r, inputs_of(batch, dtype, form))
            engine.ref.enqueue(r, True, batch)
        for r in range(num_replicas):
            for found, expected in zip(
                engine.dequeue(r), engine.ref.dequeue(r), strict=True
            ):
                cases.assert_bitwise_equal(found, expected)
        for r in reversed(range(num_replicas)):
            gradients = random_gradients(step * 10 + r)
            engine.apply(r, gradients)
            engine.ref.apply(r, gradients, HYPERPARAMETERS)
        engine.check()


def actual_and_reference(engine, verb, replica, seed):
    """Returns two functions that call the op and the reference."""
    model = engine.ref
    if verb == "dequeue":
        return (lambda: engine.dequeue(replica), lambda: model.dequeue(replica))
    if verb == "reset":
        return lambda: ops.reset_host_engine(engine.handle), model.reset
    if verb == "apply":
        gradients = random_gradients(seed)
        return (
            lambda: engine.apply(replica, gradients),
            lambda: model.apply(replica, gradients, HYPERPARAMETERS),
        )
    batch = random_batch(seed)
    inputs = inputs_of(batch)
    if verb == "bad enqueue":
        inputs["num_samples"][0] = 99
    training, valid = verb != "infer", verb != "bad enqueue"
    return (
        lambda: engine.enqueue(replica, inputs, training),
        lambda: model.enqueue(replica, training, batch, valid=valid),
    )


@given(num_replicas=st.integers(1, 3), data=st.data())
def test_calls_in_any_order_match_the_reference(num_replicas, data):
    engine = Engine(num_replicas)
    calls = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(
                    [
                        "enqueue",
                        "enqueue",
                        "dequeue",
                        "apply",
                        "apply",
                        "infer",
                        "bad enqueue",
                        "reset",
                    ]
                ),
                st.integers(0, num_replicas - 1),
            ),
            max_size=25,
        )
    )
    for seed, (verb, replica) in enumerate(calls):
        real, model = actual_and_reference(engine, verb, replica, seed)
        try:
            expected = model()
        except ref.OrderError:
            with pytest.raises(FailedPrecondition):
                real()
        except ValueError:
            with pytest.raises(InvalidArgument):
                real()
        else:
            for one, other in zip(real() or [], expected or [], strict=True):
                cases.assert_bitwise_equal(one, other)
        engine.check()


def test_a_step_runs_in_a_function():
    engine = Engine()
    batch, gradients = random_batch(1), random_gradients(1)
    inputs = inputs_of(batch)

    @tf.function
    def step(inputs, gradients):
        engine.enqueue(0, inputs)
        activations = engine.dequeue(0)
        assert [one.shape.as_list() for one in activations] == [
            [None, 3],
            [None, 2, 16],
            [None, 3],
            [None, 16],
        ]
        engine.apply(0, gradients)
        return activations

    for _ in range(3):
        engine.ref.enqueue(0, True, batch)
        expected = engine.ref.dequeue(0)
        engine.ref.apply(0, gradients, HYPERPARAMETERS)
        for found, wanted in zip(
            step(inputs, gradients), expected, strict=True
        ):
            cases.assert_bitwise_equal(found, wanted)
        engine.check()


def test_an_empty_batch_is_a_valid_step():
    engine = Engine()
    batch = [[] for _ in FEATURES]
    engine.enqueue(0, inputs_of(batch))
    for found, feature in zip(engine.dequeue(0), FEATURES, strict=True):
        assert found.shape[0] == 0
        assert found.shape[-1] == DIMS[feature.table]
    before = engine.values()
    engine.apply(0, random_gradients(0, num_samples=0))
    for found, expected in zip(engine.values(), before, strict=True):
        cases.assert_bitwise_equal(found, expected)
    assert engine.describe() == ([0], [False], 1, False)


BAD_ENQUEUE = {
    "an id outside": (
        lambda i: i["ids"].__setitem__(0, i["ids"][0] * 0 + 7),
        "Feature 'clicked', sample 0: id 7 is outside table 'ads' with 7 rows",
    ),
    "ids of rank 2": (
        lambda i: i["ids"].__setitem__(1, i["ids"][1][None]),
        "`ids` must have rank 1",
    ),
    "weights of rank 2": (
        lambda i: i["weights"].__setitem__(0, np.ones([1, 0], np.float32)),
        "`weights` must have rank 1",
    ),
    "weights of a sequence": (
        lambda i: i["weights"].__setitem__(
            1, np.ones(len(i["ids"][1]), np.float32)
        ),
        "Feature 'text': a sequence feature takes no weights",
    ),
    "splits of rank 0": (
        lambda i: i["splits"].__setitem__(0, np.int64(0)),
        "`splits` must be row_splits of rank 1",
    ),
    "splits of rank 3": (
        lambda i: i["splits"].__setitem__(0, np.zeros([1, 1, 2], np.int64)),
        "`splits` must be row_splits of rank 1",
    ),
    "indices of three columns": (
        lambda i: i["splits"].__setitem__(0, np.zeros([2, 3], np.int64)),
        r"indices \[num_ids, 2\]",
    ),
    "splits that fall": (
        lambda i: i["splits"][0].__setitem__(1, 99),
        "Feature 'clicked': row_splits must not decrease",
    ),
    "too many samples": (
        lambda i: i["num_samples"].__setitem__(2, 4),
        "Feature 'shown': row_splits must have num_samples",
    ),
    "negative samples": (
        lambda i: i["num_samples"].__setitem__(2, -1),
        "Feature 'shown'",
    ),
    "more samples than fit": (
        lambda i: i["num_samples"].__setitem__(2, 2**62),
        "Feature 'shown'",
    ),
    "samples of rank 2": (
        lambda i: i.update(num_samples=i["num_samples"][None]),
        "`num_samples` must have one value per feature",
    ),
}


@pytest.mark.parametrize("case", BAD_ENQUEUE)
def test_an_invalid_batch_raises_and_is_not_kept(case):
    change, words = BAD_ENQUEUE[case]
    engine = Engine()
    inputs = inputs_of(
        [
            [[(1, 2.0), (2, 1.0)]] * 3
            if one.max_sequence_length == 0
            else [[(1, 1.0)]] * 3
            for one in FEATURES
        ]
    )
    change(inputs)
    with pytest.raises(InvalidArgument, match=words):
        engine.enqueue(0, inputs)
    assert engine.describe() == ([0], [False], 0, False)


def dequeued_engine():
    engine = Engine()
    engine.enqueue(0, inputs_of(random_batch(1)))
    engine.dequeue(0)
    return engine


def swapped(values, place, value):
    return [*values[:place], value, *values[place + 1 :]]


BAD_APPLY = {
    "a gradient too long": (
        lambda e: {
            "gradients": swapped(
                random_gradients(1), 2, np.ones([4, 3], np.float32)
            )
        },
        "Feature 'shown': its gradient must be shaped like its activation",
    ),
    "a gradient transposed": (
        lambda e: {
            "gradients": swapped(
                random_gradients(1), 3, np.ones([16, 3], np.float32)
            )
        },
        r"Feature 'bag': .*\[num_samples, 16\]. Received: shape \[16,3\]",
    ),
    "a gradient of a flat sequence": (
        lambda e: {
            "gradients": swapped(
                random_gradients(1), 1, np.ones([6, 16], np.float32)
            )
        },
        r"Feature 'text': .*\[num_samples, 2, 16\]",
    ),
    "too few gradients": (
        lambda e: {"gradients": random_gradients(1)[:3]},
        "This engine has 4 features. Received: 3 gradients",
    ),
    "a rate of nan": (
        lambda e: {"hyperparameters": [[0.1], [np.nan]]},
        "Table 'words': the learning rate must be finite",
    ),
    "a table without rate": (
        lambda e: {"hyperparameters": [[0.1]]},
        "This engine has 2 tables. Received: 1 hyperparameters",
    ),
    "too few shards": (
        lambda e: {"shards": cases.handles(e.shards[:-1])},
        "need 5 `shards`. Received: 4",
    ),
    "too many slots": (
        lambda e: {"slots": cases.handles(e.slots + [tf.Variable([1.0])])},
        "need 2 `slots`. Received: 3",
    ),
    "a shard of another table": (
        lambda e: {"shards": cases.handles(e.shards[::-1])},
        "Table 'ads': shard 0 must be",
    ),
    "slots exchanged": (
        lambda e: {"slots": cases.handles(e.slots[::-1])},
        r"Table 'ads \(slot variable\)': shard 0 must be",
    ),
    "one shard twice": (
        lambda e: {"slots": cases.handles(e.shards[:2])},
        "the same variable twice",
    ),
}


@pytest.mark.parametrize("case", BAD_APPLY)
def test_an_invalid_update_writes_nothing_and_can_be_retried(case):
    changes, words = BAD_APPLY[case]
    engine = dequeued_engine()
    before, described = engine.values(), engine.describe()
    arguments = {"gradients": random_gradients(1), **changes(engine)}
    with pytest.raises(InvalidArgument, match=words):
        engine.apply(0, **arguments)
    assert engine.describe() == described
    for found, expected in zip(engine.values(), before, strict=True):
        cases.assert_bitwise_equal(found, expected)
    engine.apply(0, random_gradients(1))
    assert engine.describe() == ([0], [False], 1, False)


def test_an_invalid_learning_rate_of_any_replica_raises():
    engine = Engine(2)
    for r in (0, 1):
        engine.enqueue(r, inputs_of(random_batch(r)))
        engine.dequeue(r)
    with pytest.raises(InvalidArgument, match="learning rate"):
        engine.apply(0, random_gradients(0), hyperparameters=[[np.nan], [0.1]])
    assert engine.describe() == ([0, 0], [True, True], 0, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shards": slice(0, 4)}, "needs 3 shards. Received: 2"),
        ({"dims": [3, 16, 3, 17]}, "`dims` and `max_sequence_lengths` must"),
        ({"max_sequence_lengths": [0, 3, 0, 0]}, "`dims` and"),
        (
            {"dims": [3, 16, 3], "max_sequence_lengths": [0, 2, 0]},
            "`dims`|dims",
        ),
    ],
)
def test_a_failed_lookup_keeps_the_step(changes, words):
    engine = Engine()
    engine.enqueue(0, inputs_of(random_batch(1)))
    if "shards" in changes:
        changes = {"shards": cases.handles(engine.shards[changes["shards"]])}
    with pytest.raises((InvalidArgument, ValueError), match=words):
        engine.dequeue(0, **changes)
    assert engine.describe() == ([1], [False], 0, False)
    engine.dequeue(0)


def test_a_value_read_before_an_update_does_not_change():
    engine = dequeued_engine()
    held = [one.read_value() for one in engine.shards + engine.slots]
    before = [value.numpy().copy() for value in held]
    engine.apply(0, random_gradients(1))
    for value, expected in zip(held, before, strict=True):
        cases.assert_bitwise_equal(value, expected)
    assert any(
        (found != expected).any()
        for found, expected in zip(engine.values(), before, strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_replicas": 2**31 - 1}, "`num_replicas` must be in"),
        ({"table_names": ["ads", "ads"]}, "Two tables have the name 'ads'"),
        ({"table_names": ["ads"]}, "too many values|names no table"),
        (
            {"table_num_rows": [7]},
            "Table 'words': an attribute `table_\\*` has too few",
        ),
        (
            {"table_num_rows": [7, 6]},
            "Table 'words': its offsets must end with",
        ),
        ({"table_dims": [3, 0]}, "Table 'words': dim must be at least 1"),
        ({"table_num_shards": [2, 2**63 - 1]}, "Table 'words'"),
        ({"table_num_shards": [2, 0]}, "Table 'words'"),
        ({"table_num_shards": [2, -4]}, "Table 'words'"),
        ({"table_offsets": [0, 4, 7, 0, 2, 4, 5, 6]}, "too many values"),
        ({"table_offsets": []}, "Table 'ads'"),
        ({"table_offsets": [0, 4, 7, 0, 1, 4, 5]}, "split the rows evenly"),
        ({"table_placements": ["div", "hash"]}, "one of div, mod, offsets"),
        (
            {"table_optimizers": ["newton", "sgd"]},
            "`optimizer` must be one of none, sgd, adagrad",
        ),
        ({"feature_tables": [0, 1, 0, 2]}, "Feature 'bag'"),
        ({"feature_tables": [0, 1, 0, -1]}, "Feature 'bag'"),
        (
            {"feature_combiners": ["mean"] * 3 + ["max"]},
            "one of sum, mean, sqrtn",
        ),
        ({"feature_max_sequence_lengths": [0, 2, 0, -1]}, "Feature 'bag'"),
        ({"feature_names": ["clicked"]}, "too many values"),
        (
            {
                "feature_names": [],
                "feature_tables": [],
                "feature_combiners": [],
                "feature_max_sequence_lengths": [],
            },
            "at least one feature",
        ),
    ],
)
def test_an_invalid_configuration_raises(changes, words):
    with pytest.raises(InvalidArgument, match=words):
        ops.create_host_engine(**attrs(**changes))


def test_a_sequence_feature_that_overflows_raises():
    handle = ops.create_host_engine(
        **attrs(feature_max_sequence_lengths=[0, 2**62, 0, 0])
    )
    with pytest.raises(InvalidArgument, match="activation rows"):
        ops.enqueue_step(
            engine=handle,
            replica=0,
            training=False,
            **inputs_of(random_batch(1)),
        )


def test_invalid_engine_handles_raise():
    engine = Engine()
    for bad in (tf.stack([engine.handle] * 2), engine.shards[0].handle):
        with pytest.raises(tf.errors.OpError):
            ops.describe_host_engine(bad)
    with pytest.raises(tf.errors.OpError):
        engine.dequeue(0, shards=[engine.handle] * 5)


def test_the_engine_is_freed_with_its_last_handle():
    engine = Engine()
    twice = tf.identity(engine.handle)
    del engine.handle
    assert ops.describe_host_engine(twice).pending.numpy().tolist() == [0]
