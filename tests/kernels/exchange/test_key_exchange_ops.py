"""Ops for keys of sharded tables match references with lists and dicts."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tests.reference import exchange
from tests.reference import vocabulary as reference
from tf_layoutmap._core import ops
from tf_layoutmap.vocabulary import bucket_layout

InvalidArgument = tf.errors.InvalidArgumentError

CAPACITY = 256
NUM_BUCKETS = bucket_layout.num_buckets_for(CAPACITY)
# Buckets of each shard, and the owner of each shard.
BUCKETS = (0, 12, 20, NUM_BUCKETS)
OWNERS = (2, 0, 1)
NO_ROW = 2**32 - 1
# The table "ads" has no keys. Features: table and combiner.
TABLES = ("ads", "words")
FEATURES = {"title": 1, "shown": 0, "body": 1}
NUM_ADS = 5


@st.composite
def batches(draw):
    """Draws a list of samples, each a list of ids, for each feature."""
    num_samples = draw(st.integers(0, 4))
    return [
        [
            draw(
                st.lists(
                    st.integers(-9, 12)
                    if table
                    else st.integers(0, NUM_ADS - 1),
                    max_size=5,
                )
            )
            for _ in range(num_samples)
        ]
        for table in FEATURES.values()
    ]


def inputs(batch):
    return {
        "ids": [np.array(sum(one, []), np.int64) for one in batch],
        "splits": [
            np.cumsum([0, *map(len, one)]).astype(np.int64) for one in batch
        ],
        "num_samples": np.array([len(one) for one in batch], np.int64),
        "weights": [np.zeros([0], np.float32) for _ in batch],
    }


def attrs(unknown_row=False):
    row_offsets = [8 * one for one in BUCKETS]
    row_offsets[-1] += 1
    return {
        "open_tables": [1],
        "has_unknown_row": [unknown_row],
        "num_owners": 3,
        "shard_owners": [0, *OWNERS],
        "table_names": TABLES,
        "table_num_rows": [NUM_ADS, 8 * NUM_BUCKETS + 1],
        "table_dims": [1, 2],
        "table_num_shards": [1, 3],
        "table_placements": ["offsets", "offsets"],
        "table_offsets": [0, NUM_ADS, *row_offsets],
        "table_optimizers": ["sgd", "sgd"],
        "feature_names": list(FEATURES),
        "feature_tables": list(FEATURES.values()),
        "feature_combiners": ["mean", "sum", "sum"],
        "feature_max_sequence_lengths": [0, 0, 0],
    }


def bucket_of(key):
    return reference.Vocabulary(CAPACITY).bucket(key)


def shard_of(key):
    return int(np.searchsorted(BUCKETS[1:], bucket_of(key), side="right"))


def uses_by_owner(batch):
    """Returns `{key: uses}` for each owner and each feature with keys."""
    return [
        [
            exchange.key_uses(
                sum(samples, []), lambda key: OWNERS[shard_of(key)] == owner
            )
            for samples, table in zip(batch, FEATURES.values(), strict=True)
            if table
        ]
        for owner in range(3)
    ]


@given(batch=batches())
def test_requests_have_each_key_once_with_its_uses(batch):
    found = ops.request_keys(**inputs(batch), **attrs())
    assert found.error.numpy() == b""
    for owner, uses in enumerate(uses_by_owner(batch)):
        words = exchange.key_request(uses)
        cases.assert_bitwise_equal(found.requests[owner], words)
        assert found.sizes[owner].numpy().tolist() == [
            len(words),
            sum(map(len, uses)),
        ]


def planned(batch, rows, unknown_row=False):
    of_op = attrs(unknown_row)
    # The op has one tensor of rows for each owner.
    del of_op["num_owners"]
    return ops.plan_key_exchange(**batch, training=True, rows=rows, **of_op)


def row_of(key):
    """Row of a key in its shard; some keys have no row."""
    return None if key % 3 == 0 else key + 9


@given(batch=batches(), unknown_row=st.booleans())
def test_plans_have_the_rows_of_the_owners(batch, unknown_row):
    rows = [
        np.array(
            [
                NO_ROW if row_of(key) is None else row_of(key)
                for of_feature in uses
                for key in of_feature
            ],
            np.uint32,
        )
        for uses in uses_by_owner(batch)
    ]
    found = planned(inputs(batch), rows, unknown_row)
    assert found.error.numpy() == b""
    for owner, words in enumerate(found.contributions):
        read = ops.read_contributions(words=words, num_features=3)
        for f, (samples, table) in enumerate(
            zip(batch, FEATURES.values(), strict=True)
        ):
            expected, gains, sizes = [], [], []
            for sample in samples:
                own = []
                for key in sample:
                    if not table:
                        place = (0, key)
                    elif row_of(key) is not None:
                        place = (OWNERS[shard_of(key)], row_of(key))
                    elif unknown_row:  # The last row of the last shard.
                        place = (OWNERS[-1], 8 * (BUCKETS[3] - BUCKETS[2]))
                    else:
                        continue
                    if place[0] == owner:
                        own.append(place[1])
                        # A key without a row counts in the mean.
                        gains.append(1 if f else np.float32(1) / len(sample))
                expected += own
                sizes += [len(own)] if own else []
            cases.assert_bitwise_equal(
                read.ids[f], np.array(expected, np.int64)
            )
            cases.assert_bitwise_equal(
                read.splits[f], np.cumsum([0, *sizes]).astype(np.int64)
            )
            weights = read.weights[f].numpy()
            np.testing.assert_array_equal(
                weights if len(weights) else np.ones_like(gains),
                np.array(gains, np.float32),
            )


def test_invalid_batches_and_rows_are_returned_and_not_raised():
    bad = inputs([[[reference.EMPTY]], [[0]], [[]]])
    found = ops.request_keys(**bad, **attrs())
    assert "Feature 'title': a key must not be" in found.error.numpy().decode()
    assert not found.sizes.numpy().any()
    good = inputs([[[5]], [[0]], [[]]])
    rows = [np.zeros([0], np.uint32)] * 3
    found = planned(good, rows)
    assert "must have 1 rows. Received: 0" in found.error.numpy().decode()
    rows[OWNERS[shard_of(5)]] = np.array([8 * NUM_BUCKETS], np.uint32)
    found = planned(good, rows)
    assert "rows of the requested shards" in found.error.numpy().decode()


class Shard:
    """The engine of one process, with one shard of the table "words"."""

    def __init__(self, first, last, *, telling=False, **policy):
        self.buckets = range(first, last)
        self.policy = policy
        size = last - first
        num_rows = 8 * size + (last == NUM_BUCKETS)
        self.engine = ops.create_host_engine(
            num_replicas=1,
            table_first_rows=[8 * first],
            table_vocabulary_buckets=[NUM_BUCKETS],
            table_names=["words"],
            table_num_rows=[num_rows],
            table_dims=[2],
            table_num_shards=[1],
            table_placements=["div"],
            table_offsets=[0, num_rows],
            table_optimizers=["sgd"],
            feature_names=["words"],
            feature_tables=[0],
            feature_combiners=["sum"],
            feature_max_sequence_lengths=[0],
        )
        segments = size // (NUM_BUCKETS // 8)
        self.lanes = [
            tf.Variable(tf.fill([size, 8], tf.constant(value, dtype)))
            for value, dtype in (
                (reference.EMPTY, tf.int64),
                (0, tf.int32),
                (0, tf.int32),
            )
        ]
        self.sketch = (
            [
                tf.Variable(tf.zeros([segments, 2, 256], tf.uint8)),
                tf.Variable(tf.zeros([segments], tf.int64)),
            ]
            if policy.get("admission") == "count"
            else []
        )
        self.numbers = tf.Variable(tf.zeros([10], tf.int64))
        self.rows = tf.Variable(tf.zeros([num_rows, 2]))
        self.telling = telling

    def variables(self):
        return {
            "state": [
                one.handle for one in (*self.lanes, *self.sketch, self.numbers)
            ],
            "shards": [self.rows.handle],
            "slots": [],
        }

    def admit(self, requests, **options):
        return ops.admit_requests(
            engine=self.engine,
            requests=requests,
            key_kinds=[1],
            **self.variables(),
            open_tables=[0],
            has_unknown_row=[False],
            admissions=[self.policy.get("admission", "all")],
            evictions=[self.policy.get("evict", "lru")],
            policies=[
                self.policy.get("min_count", 1),
                0,
                0,
                0,
                int(self.policy.get("fails_when_full", False)),
                0,
            ],
            first_values=["constant"],
            first_limits=[2.0, 0.0],
            first_seeds=[0],
            slot_values=[],
            telling=[0] if self.telling else [],
            Tevicted=[tf.int64, tf.float32] if self.telling else [],
            **{
                "training": True,
                "request_tables": [0, 0],
                "keeps_change": False,
                **options,
            },
        )

    def take_back(self, **options):
        ops.take_back_keys(
            engine=self.engine,
            why="failed elsewhere",
            raises=False,
            **self.variables(),
            **options,
        )


def requests_of(shard, batch):
    """Returns the requests of replicas; a batch has two features each."""
    uses = [
        [
            exchange.key_uses(keys, lambda key: bucket_of(key) in shard.buckets)
            for keys in features
        ]
        for features in batch
    ]
    return uses, [exchange.key_request(one) for one in uses]


# For each step and each of two replicas, the keys of two features.
steps_of_replicas = st.lists(
    st.tuples(
        *[
            st.tuples(*[st.lists(st.integers(0, 700), max_size=60)] * 2)
            for _ in range(2)
        ]
    ),
    max_size=6,
)


def check_state(shards, expected, num_steps):
    state = expected.state()
    for place, name in enumerate(("keys", "last_step", "count")):
        found = np.concatenate([one.lanes[place].numpy() for one in shards])
        cases.assert_bitwise_equal(found.ravel(), state[name])
    for one in shards:
        assert one.numbers[0] == num_steps
    if shards[0].sketch:
        cells, seen = expected.sketch()
        cases.assert_bitwise_equal(
            np.concatenate([one.sketch[0].numpy() for one in shards]), cells
        )
        cases.assert_bitwise_equal(
            np.concatenate([one.sketch[1].numpy() for one in shards]), seen
        )


@given(
    steps=steps_of_replicas,
    policy=st.sampled_from(
        [
            {"evict": "lru"},
            {"evict": "lfu"},
            {"admission": "count", "min_count": 2},
            {"evict": "none"},
        ]
    ),
)
def test_shards_admit_the_keys_of_all_replicas_like_one_vocabulary(
    steps, policy
):
    shards = [Shard(*one, **policy) for one in zip(BUCKETS, BUCKETS[1:])]
    expected = reference.Vocabulary(CAPACITY, **policy)
    counts = collections.Counter()
    for number, batch in enumerate(steps, start=1):
        # The order of one process: by feature, then by replica.
        keys = [key for f in range(2) for one in batch for key in one[f]]
        found = expected.admit(keys, number, number)
        counts.update(
            {name: found[name] for name in found if name.startswith("num_")}
        )
        for shard in shards:
            uses, requests = requests_of(shard, batch)
            admitted = shard.admit(requests)
            assert admitted.error.numpy() == b""
            assert admitted.steps.numpy().tolist() == [number, number]
            for of_replica, rows in zip(uses, admitted.rows, strict=True):
                wanted = [
                    expected.find([key])[0]
                    for feature in of_replica
                    for key in feature
                ]
                first = 8 * shard.buckets.start
                assert rows.numpy().tolist() == [
                    NO_ROW if row < 0 else row - first for row in wanted
                ]
    check_state(shards, expected, len(steps))
    names = ("num_lookups", "num_known", None, "num_admitted", "num_rejected")
    totals = sum(one.numbers.numpy() for one in shards)
    for place, name in enumerate(names, start=2):
        if name:
            assert totals[place] == counts[name], name
    # All rows of admitted keys have their initial values.
    for shard in shards:
        is_key = shard.lanes[0].numpy().ravel() != reference.EMPTY
        rows = shard.rows.numpy()[: len(is_key)]
        assert (rows[is_key] == 2).all() and not rows[~is_key].any()


def full_batch():
    """Returns a step that fills the vocabulary."""
    keys = list(range(2000))
    return (([1, 2], keys), ([], keys[::-1]))


def test_a_forward_only_step_admits_no_key():
    shard = Shard(0, 12)
    _, requests = requests_of(shard, (([5, 7, 9], [11]), ([], [])))
    admitted = shard.admit(requests, training=False)
    assert admitted.steps.numpy().tolist() == [0, 0]
    assert set(np.concatenate(admitted.rows).tolist()) <= {NO_ROW}
    assert not shard.numbers.numpy().any()


def test_a_full_vocabulary_returns_an_error_and_changes_nothing():
    shard = Shard(0, 12, evict="none", fails_when_full=True)
    _, requests = requests_of(shard, full_batch())
    admitted = shard.admit(requests)
    assert "has no free row" in admitted.error.numpy().decode()
    assert [len(one) for one in admitted.rows] == [0, 0]
    assert admitted.steps.numpy().tolist() == [0, 0]
    assert not shard.numbers.numpy().any()
    assert (shard.lanes[0].numpy() == reference.EMPTY).all()


def test_several_calls_of_a_step_are_undone_together():
    shard = Shard(12, 20, telling=True)
    shard.admit(requests_of(shard, full_batch())[1])
    before = [one.numpy() for one in (*shard.lanes, shard.numbers)]
    rows = shard.rows.numpy()
    shard.rows.assign(rows + 1)  # Rows of evicted keys are restored.
    later = ((list(range(5000, 5040)), []), ([], list(range(6000, 6040))))
    _, requests = requests_of(shard, later)
    evicted = []
    for number, one in enumerate(requests):
        admitted = shard.admit([one], num_earlier=number)
        evicted.append(admitted.evicted[0].numpy())
        assert (admitted.evicted[1].numpy() == 3).all()
        assert len(evicted[-1]) > 3
    # The second call does not evict a key of the first call.
    assert not set(evicted[1]) & set(later[0][0])
    shard.take_back()
    for one, value in zip((*shard.lanes, shard.numbers), before, strict=True):
        cases.assert_bitwise_equal(one, value)
    cases.assert_bitwise_equal(shard.rows, rows + 1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="no change"):
        shard.take_back()
    shard.take_back(may_be_missing=True)


def test_rows_of_steps_in_flight_are_not_evicted():
    shard = Shard(12, 20)
    shard.admit(requests_of(shard, full_batch())[1])
    stored = shard.lanes[0].numpy().ravel()
    pinned = np.flatnonzero(stored != reference.EMPTY)[::2]
    ops.enqueue_step(
        engine=shard.engine,
        replica=0,
        training=True,
        ids=[pinned],
        splits=[np.zeros([0], np.int64)],
        num_samples=[len(pinned)],
        weights=[np.zeros([0], np.float32)],
    )
    later = ((list(range(5000, 7000)), []), ([], []))
    shard.admit(requests_of(shard, later)[1])
    now = shard.lanes[0].numpy().ravel()
    np.testing.assert_array_equal(now[pinned], stored[pinned])
    assert (now != stored).any()
    found = ops.evict_keys(
        engine=shard.engine,
        keys=np.array([*now[::3], 10**9], np.int64)[
            ~np.isin(np.array([*now[::3], 10**9]), stored[pinned])
        ],
        table=0,
        expired=False,
        admission="all",
        evict="lru",
        policy=[1, 0, 0, 0, 0, 0],
        Tvalues=[tf.float32],
        **shard.variables(),
    )
    assert len(found.evicted) > 3
    assert (found.values[0].numpy() == 2).all()
    gone = np.isin(now, found.evicted.numpy())
    np.testing.assert_array_equal(
        shard.lanes[0].numpy().ravel()[gone], reference.EMPTY
    )
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="in flight uses its row"
    ):
        ops.evict_keys(
            engine=shard.engine,
            keys=stored[pinned][:1],
            table=0,
            expired=False,
            admission="all",
            evict="lru",
            policy=[1, 0, 0, 0, 0, 0],
            Tvalues=[tf.float32],
            **shard.variables(),
        )


def test_a_lookup_protects_the_rows_since_its_vocabulary_step():
    shard = Shard(12, 20)
    _, requests = requests_of(shard, full_batch())
    step = shard.admit(requests).steps.numpy()[:1]
    stored = shard.lanes[0].numpy().ravel()
    used = np.flatnonzero(stored != reference.EMPTY)[::2]
    token = ops.open_step(
        engine=shard.engine,
        replica=0,
        ids=[used[:1]],
        splits=[np.zeros([0], np.int64)],
        num_samples=[1],
        weights=[np.zeros([0], np.float32)],
        vocabulary_steps=step + 1,
    )
    # The next step uses these rows, and later steps must not evict them.
    again = (([int(key) for key in stored[used]], []), ([], []))
    assert shard.admit(requests_of(shard, again)[1]).steps[0] == step + 1
    later = requests_of(shard, ((list(range(5000, 7000)), []), ([], [])))[1]
    shard.admit(later)
    now = shard.lanes[0].numpy().ravel()
    np.testing.assert_array_equal(now[used], stored[used])
    assert (now != stored).any()
    mark = ops.follow_step(
        engine=shard.engine,
        replica=0,
        token=token,
        gradients=[np.zeros([1, 2], np.float32)],
        coordinates=np.zeros([0], np.float32),
    )
    ops.apply_followed(
        engine=shard.engine,
        replica=0,
        marks=mark,
        hyperparameters=[np.array([0.5], np.float32)],
        shards=[shard.rows.handle],
        slots=[],
        rounding_steps=[],
    )
    # The update has ended the lookup.
    last = requests_of(shard, ((list(range(8000, 9999)), []), ([], [])))[1]
    shard.admit(last)
    now = shard.lanes[0].numpy().ravel()
    assert not np.isin(now[used], stored[used]).all()


@pytest.mark.parametrize(
    "words, message",
    [
        ([1], "`requests` must be the keys of 2 features"),
        ([1, 0, 5, 0, 0, 0, 9], "Received: 7 words"),
    ],
)
def test_malformed_requests_raise(words, message):
    with pytest.raises(InvalidArgument, match=message):
        Shard(0, 12).admit([np.array(words, np.uint32)])


def test_keys_of_other_shards_are_errors():
    shard = Shard(0, 12)
    other = next(key for key in range(99) if bucket_of(key) >= 12)
    request = exchange.key_request([{other: 1}, {}])
    found = shard.admit([request]).error.numpy().decode()
    assert "must have keys of the shards" in found
    found = shard.admit([request], request_tables=[-1, 0]).error.numpy()
    assert "tables without a shard" in found.decode()


def test_find_keys_ignores_keys_of_other_shards():
    shard = Shard(12, 20)
    shard.admit(requests_of(shard, (([], [3, 5, 8, 13]), ([], [])))[1])
    keys = np.arange(20).reshape([4, 5])
    found = ops.find_keys(
        shards=[shard.lanes[0].handle],
        offsets=[0, 8],
        keys=keys,
        table="words",
        first_bucket=12,
        vocabulary_buckets=NUM_BUCKETS,
    ).numpy()
    assert found.shape == keys.shape
    stored = shard.lanes[0].numpy().ravel()
    for key, row in zip(keys.ravel(), found.ravel(), strict=True):
        if key in stored:
            assert stored[row - 8 * 12] == key
        else:
            assert row == -1
