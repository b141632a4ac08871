"""Ops of a server whose tables share a vocabulary, compared with numpy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tests.reference import servers, shared_vocabulary
from tests.reference import vocabulary as reference
from tf_layoutmap._core import ops
from tf_layoutmap.embedding.servers import closures, key_step_ops
from tf_layoutmap.vocabulary import bucket_layout

InvalidArgument = tf.errors.InvalidArgumentError
NUM_BUCKETS = 2
NUM_ROWS = NUM_BUCKETS * 8 + 1
DIMS = {"wide": 1, "deep": 3}
# The constant initial values of the tables and of the slot variable of `deep`.
FIRST, FIRST_SLOT = {"wide": 0.25, "deep": 0.5}, 0.125
# The shard of `wide` has index 0 and uses the vocabulary of `deep`.
WIDE, DEEP = 0, 1


class Server:
    """A server with one shard of two tables that share a vocabulary."""

    def __init__(self):
        self.rows = [
            tf.Variable(tf.fill([NUM_ROWS, dim], -1.0)) for dim in DIMS.values()
        ]
        self.slots = [tf.Variable(tf.fill([NUM_ROWS, DIMS["deep"]], -1.0))]
        lanes = [NUM_BUCKETS, 8]
        self.state = [
            tf.Variable(tf.fill(lanes, bucket_layout.EMPTY_KEY)),
            tf.Variable(tf.zeros(lanes, tf.int32)),
            tf.Variable(tf.zeros(lanes, tf.int32)),
            tf.Variable(tf.zeros([10], tf.int64)),
        ]
        self.fetched = tf.Variable(
            tf.zeros([key_step_ops.FETCHED_SIZE], tf.int64)
        )
        self.applied = tf.Variable(tf.zeros([closures.NUM_APPLIED], tf.int64))
        self.handle = self.create()

    def create(self, **changes):
        """Creates the resource, with some changed arguments."""
        return ops.create_server(
            **{
                "shards": cases.handles(self.rows),
                "slots": cases.handles(self.slots),
                "rounding_steps": [],
                "state": cases.handles(self.state),
                "fetched_steps": [self.fetched.handle],
                "applied": self.applied.handle,
                "tables": list(DIMS),
                "table_numbers": [0, 1],
                "first_rows": [0, 0],
                "dims": list(DIMS.values()),
                "dtypes": [tf.float32] * 2,
                "optimizers": ["sgd", "adagrad"],
                "num_hyperparameters": [1, 1],
                "open_pieces": [0, 1],
                "first_buckets": [0, 0],
                "vocabulary_buckets": [NUM_BUCKETS] * 2,
                "has_unknown_row": [False] * 2,
                "admissions": ["all"] * 2,
                "evictions": ["lru"] * 2,
                "policies": [1, 2**32, 0, 0, 0, 0] * 2,
                "first_values": ["constant"] * 2,
                "first_limits": [FIRST["wide"], 0.0, FIRST["deep"], 0.0],
                "first_seeds": [1, 2],
                "slot_values": [FIRST_SLOT],
                "vocabulary_of": [DEEP, DEEP],
                **changes,
            }
        )

    def write(self, keys, rows, **changes):
        """Writes rows of `wide`."""
        return ops.write_keys(
            **{
                "engine": [],
                "server": [self.handle],
                "state": cases.handles(self.state),
                "shards": [self.rows[WIDE].handle],
                "slots": [],
                "fetched_steps": [self.fetched.handle],
                "sharing_shards": cases.handles([self.rows[DEEP], *self.slots]),
                "keys": np.array(keys, np.int64),
                "last_steps": np.zeros([0], np.int32),
                "counts": np.zeros([0], np.int32),
                "step": tf.constant(0, tf.int64),
                "values": np.array(rows, np.float32),
                "slot_values": [],
                "table": "wide",
                "table_index": 0,
                "first_bucket": 0,
                "vocabulary_buckets": NUM_BUCKETS,
                "has_sketch": False,
                "key_kind": 1,
                "first_values": "constant",
                "first_limits": [FIRST["wide"], 0.0],
                "first_seed": 1,
                "initial_slots": [],
                "sharing": [DEEP],
                "sharing_first_values": ["constant"],
                "sharing_first_limits": [FIRST["deep"], 0.0],
                "sharing_first_seeds": [2],
                "sharing_initial_slots": [FIRST_SLOT],
                **changes,
            }
        )

    def fetch(self, keys, **options):
        return ops.fetch_keys(
            server=self.handle, request=request_of(keys, **options)
        )

    def finish(self):
        """Ends all steps that wait for gradients."""
        self.fetched.assign(tf.zeros_like(self.fetched))

    def evict(self, keys, piece=DEEP):
        return ops.evict_server_keys(
            server=self.handle,
            keys=tf.constant(keys, tf.int64),
            piece=piece,
            expired=False,
            only_check=False,
        )

    def values(self):
        return [
            one.numpy()
            for one in (*self.rows, *self.slots, *self.state, self.fetched)
        ]


def request_of(keys, kinds=(1, 1), token=(0, -1, 0)):
    """Returns a training request; see cc/core/served_keys/key_messages.h.

    Args:
      keys: For each table, its keys; each use of a key is an element.
      kinds: The kind of the keys of each table.
      token: Epoch, number and attempt of the closure.
    """
    unique = [list(dict.fromkeys(one)) for one in keys]
    head = np.array([*token, 1], np.int64).tobytes()
    words = [0, *map(len, unique), *kinds]
    head += np.array(words, np.uint32).tobytes()
    head += bytes(-len(head) % 8)
    body = b"".join(np.array(one, np.int64).tobytes() for one in unique)
    for table, own in zip(keys, unique):
        body += servers.coded_rows(
            np.cumsum([table.count(key) for key in own], dtype=int).tolist()
        )
    return np.frombuffer(head + body, np.uint8)


def reply_to(keys, rows, tables):
    """Returns the rows of keys and their values as in a reply.

    Args:
      keys: For each table, its unique keys.
      rows: The row of each key, or -1.
      tables: The rows of each table.
    """
    words = [rows[key] for one in keys for key in one]
    head = np.array(words, np.int64).astype(np.uint32).tobytes()
    head += bytes(-len(head) % 8)
    values = [
        table[sorted({rows[key] for key in one} - {-1})].tobytes()
        for one, table in zip(keys, tables)
    ]
    return head + b"".join(values)


class Reference:
    """The vocabulary, and the rows of both tables, as numpy arrays."""

    def __init__(self):
        self.vocabulary = reference.Vocabulary(8 * NUM_BUCKETS)
        self.step = 0
        self.tables = [
            np.full([NUM_ROWS, dim], -1, np.float32) for dim in DIMS.values()
        ]
        self.slot = np.full([NUM_ROWS, DIMS["deep"]], -1, np.float32)

    def initialize(self, rows):
        for table, first in zip(self.tables, FIRST.values()):
            table[rows] = first
        self.slot[rows] = FIRST_SLOT

    def admit(self, wide, deep):
        """Admits keys in a step; returns the row of each key."""
        self.step += 1
        merged = shared_vocabulary.merge([deep, wide])
        found = self.vocabulary.admit(merged, self.step, self.step)
        self.initialize([row for row, _, _ in found["new"]])
        return dict(zip(merged, found["rows"]))

    def write(self, keys, values):
        """Writes the rows of `wide`; returns the row of each key."""
        rows, new = self.vocabulary.write(keys, self.step)
        self.initialize([row for key, row in zip(keys, rows) if key in new])
        for row, value in zip(rows, values):
            if row >= 0:
                self.tables[WIDE][row] = value
        return rows

    def check(self, server):
        state = self.vocabulary.state()
        for found, name in zip(server.state, ("keys", "last_step", "count")):
            np.testing.assert_array_equal(found.numpy().ravel(), state[name])
        assert server.state[3].numpy()[0] == self.step
        for found, expected in zip(
            [*server.rows, *server.slots], [*self.tables, self.slot]
        ):
            cases.assert_bitwise_equal(found.numpy(), expected)


some_keys = st.lists(st.integers(0, 40), max_size=12)
calls = st.one_of(
    st.tuples(st.just("step"), some_keys, some_keys),
    st.tuples(st.just("evict"), some_keys),
    st.tuples(
        st.just("write"), st.lists(st.integers(0, 40), max_size=6, unique=True)
    ),
)


@given(st.lists(calls, min_size=1, max_size=8))
def test_steps_evictions_and_writes_equal_numpy(program):
    server, ref = Server(), Reference()
    watch = ops.watch_server_rows(server=server.handle)
    changed = [set(), set()]
    for number, (call, *arguments) in enumerate(program):
        if call == "step":
            wide, deep = arguments
            before = set(ref.vocabulary.known)
            reply = server.fetch([wide, deep]).numpy().tobytes()
            rows = ref.admit(wide, deep)
            unique = [list(dict.fromkeys(one)) for one in (wide, deep)]
            assert reply[8:] == reply_to(unique, rows, ref.tables)
            changed[DEEP] |= {row for row in rows.values() if row >= 0}
            changed[WIDE] |= {
                row
                for key, row in rows.items()
                if row >= 0 and key not in before
            }
            server.finish()
        elif call == "evict":
            (keys,) = arguments
            held = [
                key
                for key in dict.fromkeys(keys)
                if key in ref.vocabulary.known
            ]
            gone = {ref.vocabulary.known[key].row for key in held}
            ref.vocabulary.evict(keys, ref.step + 1)
            found = server.evict(keys).numpy()
            assert sorted(found) == sorted(held)
            changed[DEEP] |= gone
        else:
            (keys,) = arguments
            values = np.full([len(keys), 1], number, np.float32)
            found = server.write(keys, values).rows.numpy()
            assert found.tolist() == ref.write(keys, values)
        ref.check(server)
    lanes = cases.handles(server.state[:3])
    found = ops.take_server_rows(
        server=server.handle,
        watch=watch,
        also=[tf.zeros([0], tf.int64)] * 2,
        shards=cases.handles(server.rows),
        slots=cases.handles(server.slots),
        lanes=lanes,
        Tvalues=[
            *(tf.int64, tf.float32),
            *(tf.int64, tf.float32, tf.float32, tf.int64, tf.int32, tf.int32),
        ],
    )
    assert found[0].numpy().tolist() == sorted(changed[WIDE])
    assert found[2].numpy().tolist() == sorted(changed[DEEP])
    np.testing.assert_array_equal(
        found[5], server.state[0].numpy().ravel()[found[2]]
    )


def test_evicted_keys_are_stored_for_both_tables():
    server = Server()
    for piece in (WIDE, DEEP):
        ops.keep_evicted_rows(server=server.handle, piece=piece)
    server.fetch([list(range(16)), []])
    server.finish()
    rows = [one.numpy() for one in server.rows]
    order = server.state[0].numpy().ravel().tolist()
    server.evict([order[3]])
    # The other rows are full, and the new keys evict two keys.
    server.fetch([[100], [101, 102]])
    for piece, dtypes in ((WIDE, 1), (DEEP, 2)):
        found = ops.read_evicted_rows(
            server=server.handle,
            reported=0,
            piece=piece,
            max_bytes=10**6,
            Tvalues=[tf.float32] * dtypes,
        )
        keys = found.keys.numpy().tolist()
        assert keys[0] == order[3]
        assert len(keys) == 3
        places = [order.index(key) for key in keys]
        np.testing.assert_array_equal(found.values[0], rows[piece][places])


def test_keys_of_different_kinds_raise_and_change_nothing():
    server = Server()
    before = server.values()
    with pytest.raises(
        InvalidArgument, match="one kind for all tables.*'deep'"
    ):
        server.fetch([[1], [2]], kinds=(1, 2))
    for one, other in zip(server.values(), before):
        cases.assert_bitwise_equal(one, other)
    # The kind of a table without keys is 0.
    server.fetch([[1], []], kinds=(2, 0))
    with pytest.raises(InvalidArgument, match="must be strings"):
        server.fetch([[], [1]], kinds=(0, 1))


def test_a_shard_that_does_not_own_the_vocabulary_cannot_evict():
    server = Server()
    with pytest.raises(InvalidArgument, match="owns an open vocabulary"):
        server.evict([3], piece=WIDE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary_of": [1]}, "one value for each of 2 `open_pieces`"),
        ({"vocabulary_of": [1, 0]}, "own a vocabulary. Received: 1"),
        ({"vocabulary_of": [2, 1]}, "own a vocabulary. Received: 2"),
        ({"first_buckets": [1, 0]}, "same `first_buckets`"),
        ({"vocabulary_buckets": [4, 2]}, "same `first_buckets` and"),
        ({"vocabulary_of": []}, "need 8 variables `state`|`state`"),
    ],
)
def test_wrong_attributes_raise(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        Server().create(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": []}, "without an engine or a server"),
        ({"sharing": [2]}, r"`sharing` must be in \[0, 2\)"),
        ({"sharing_shards": []}, "sharing_shards"),
    ],
)
def test_wrong_arguments_of_a_write_raise(changes, message):
    server = Server()
    before = server.values()
    with pytest.raises(InvalidArgument, match=message):
        server.write([3], [[1.0]], **changes)
    for one, other in zip(server.values(), before):
        cases.assert_bitwise_equal(one, other)


def test_a_write_to_a_server_that_was_replaced_raises():
    server = Server()
    ops.retire_server(server=server.handle)
    with pytest.raises(tf.errors.FailedPreconditionError, match="was resized"):
        server.write([3], [[1.0]])
