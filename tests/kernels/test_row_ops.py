"""`WriteKeys` and `ReadKeys` compare with numpy, and reject invalid inputs."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.embedding.host import open_table_cases as cases
from tests.reference import vocabulary as reference
from tf_layoutmap._core import ops
from tf_layoutmap.vocabulary import bucket_layout

DIM = 3


class Table:
    """Variables of a table in shards, without an engine."""

    def __init__(self, num_buckets, sizes, *, first=0, dtype=tf.float32):
        self.num_buckets, self.first, self.dtype = num_buckets, first, dtype
        self.keys, self.steps, self.counts, self.rows, self.slots = (
            [
                tf.Variable(tf.fill([size * scale, dim], tf.constant(value, t)))
                for size in sizes
            ]
            for scale, dim, value, t in (
                (1, 8, bucket_layout.EMPTY_KEY, tf.int64),
                (1, 8, 0, tf.int32),
                (1, 8, 0, tf.int32),
                (8, DIM, 0, dtype),
                (8, 1, 0, tf.float32),
            )
        )
        self.numbers = tf.Variable(tf.zeros([10], tf.int64))

    def write(self, keys, rows=None, slots=None, **changed):
        keys = np.array(keys, np.int64)
        arguments = {
            "engine": [],
            "server": [],
            "state": [*self.keys, *self.steps, *self.counts, self.numbers],
            "shards": self.rows,
            "slots": self.slots,
            "fetched_steps": [],
            "sharing_shards": [],
            "keys": keys,
            "last_steps": np.zeros([0], np.int32),
            "counts": np.zeros([0], np.int32),
            "step": tf.constant(0, tf.int64),
            "values": tf.zeros([0, DIM], self.dtype) if rows is None else rows,
            "slot_values": [tf.zeros([0, 1]) if slots is None else slots],
            "table": "words",
            "table_index": 0,
            "first_bucket": self.first,
            "vocabulary_buckets": self.num_buckets,
            "has_sketch": False,
            "key_kind": 1,
            "first_values": "constant",
            "first_limits": [0.5, 0.0],
            "first_seed": 3,
            "initial_slots": [0.25],
            **changed,
        }
        for name in ("state", "shards", "slots"):
            arguments[name] = [one.handle for one in arguments[name]]
        return ops.write_keys(**arguments)

    def read(self, shard=0, begin=0, end=None, **changed):
        arguments = {
            "lanes": [self.keys[shard], self.steps[shard], self.counts[shard]],
            "shards": [self.rows[shard], self.slots[shard]],
            "begin": tf.constant(begin, tf.int64),
            "end": tf.constant(
                self.keys[shard].shape[0] if end is None else end, tf.int64
            ),
            "Tvalues": [self.dtype, tf.float32],
            "dims": [DIM, 1],
            "table": "words",
            **changed,
        }
        for name in ("lanes", "shards"):
            arguments[name] = [one.handle for one in arguments[name]]
        return ops.read_keys(**arguments)

    def contents(self):
        """Returns all variables as numpy arrays."""
        return [
            np.concatenate([one.numpy() for one in shards])
            for shards in (
                self.keys,
                self.steps,
                self.counts,
                self.rows,
                self.slots,
            )
        ] + [self.numbers.numpy()]


@given(
    sizes=st.sampled_from([(1,), (3, 4, 1), (8,), (5, 27)]),
    dtype=st.sampled_from([tf.float32, tf.bfloat16, tf.float16]),
    keys=st.lists(
        st.one_of(st.integers(-5, 40), st.integers(-(2**60), 2**60)),
        unique=True,
        max_size=100,
    ),
    has=st.tuples(*(st.booleans() for _ in range(4))),
    begin=st.integers(0, 5),
)
def test_the_ops_match_numpy(sizes, dtype, keys, has, begin):
    num_buckets = sum(sizes)
    table = Table(num_buckets, sizes, dtype=dtype)
    model = reference.Vocabulary(8 * num_buckets)
    known = keys[::3]
    table.write(known, tf.fill([len(known), DIM], tf.constant(7, dtype)))
    model.write(known, 0)
    numbers = np.arange(len(keys))
    rows = np.repeat(numbers[:, np.newaxis], DIM, 1)
    last_steps = (numbers % 6).astype(np.int32)
    found = table.write(
        keys,
        tf.cast(rows, dtype) if has[0] else None,
        tf.cast(rows[:, :1], tf.float32) if has[1] else None,
        step=tf.constant(5, tf.int64),
        **({"last_steps": last_steps} if has[2] else {}),
        **({"counts": last_steps + 1} if has[3] else {}),
    )
    expected, new = model.write(
        keys,
        5,
        last_steps.tolist() if has[2] else None,
        (last_steps + 1).tolist() if has[3] else None,
    )
    assert found.rows.numpy().tolist() == expected
    assert found.num_new == len(new)
    expected_row = {}
    for i, (key, row) in enumerate(zip(keys, expected)):
        if row >= 0:
            initial = 0.5 if key in new else 7.0
            expected_row[key] = (
                float(i) if has[0] else initial,
                float(i) if has[1] else 0.25,
            )
    assert table.numbers.numpy().tolist() == [
        5,
        1 if keys else 0,
        0,
        0,
        0,
        len(model.known),
        0,
        expected.count(-1) + sum(key not in model.known for key in known),
        0,
        0,
    ]
    # Each shard is read in two parts.
    read = []
    for shard, size in enumerate(sizes):
        for part in ((0, min(begin, size)), (min(begin, size), size)):
            one = table.read(shard, *part)
            read += zip(
                one.keys.numpy().tolist(),
                one.last_steps.numpy().tolist(),
                one.counts.numpy().tolist(),
                tf.cast(one.values[0], tf.float32).numpy().tolist(),
                one.values[1].numpy().tolist(),
            )
    assert read == [
        (
            key,
            last_step,
            count,
            [expected_row[key][0]] * DIM,
            [expected_row[key][1]],
        )
        for key, _, last_step, count in model.export()
    ]


def test_a_shard_of_complete_segments_accepts_its_own_keys_only():
    # The vocabulary has four segments, and the table contains the second one.
    whole, part = Table(32, [32]), Table(32, [8], first=8)
    keys = np.arange(200)
    buckets = bucket_layout.buckets_of(keys, 32)
    own = keys[(buckets >= 8) & (buckets < 16)]
    expected = whole.write(own).rows.numpy()
    np.testing.assert_array_equal(part.write(own).rows, expected)
    with pytest.raises(tf.errors.InvalidArgumentError, match="words"):
        part.write(keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": [[1]]}, "`keys` must have rank 1"),
        ({"keys": [5, 5]}, "Keys must be unique. Received twice: 5"),
        ({"values": tf.ones([2, DIM])}, "`values` must have one row for each"),
        ({"values": tf.ones([1, 2])}, "words"),
        ({"slot_values": [tf.ones([2, 1])]}, "`slot_values` must have one row"),
        ({"slot_values": [tf.ones([1, 2])]}, r"words \(slot variable\)"),
        ({"last_steps": [6]}, r"`last_steps` must be in \[0, 0\]"),
        ({"counts": [-1]}, "`counts` must be in"),
        ({"counts": [1, 2]}, "`counts` must have one value for each of 1 keys"),
        ({"key_kind": 2}, "must be integers, as those before"),
        ({"initial_slots": []}, "Table 'words' needs"),
        (
            {"slot_values": [tf.zeros([0, 1])] * 2},
            "Table 'words' needs 1 `slot_values`",
        ),
        ({"first_limits": [1.0]}, "`first_limits` must have two values"),
        ({"first_bucket": 1}, "The shards must end at 8. Received: 9"),
        ({"vocabulary_buckets": 9}, "buckets"),
        ({"has_sketch": True}, "Table 'words' needs"),
        ({"step": tf.constant(2**31, tf.int64)}, r"`step` must be at most 2"),
    ],
)
def test_an_invalid_write_raises_and_changes_nothing(arguments, message):
    table = Table(8, [3, 5])
    table.write([1, 2], tf.ones([2, DIM]))
    before = table.contents()
    arguments = {"keys": [7], **arguments}
    keys = arguments.pop("keys")
    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError), match=message
    ):
        table.write(keys, **arguments)
    for found, expected in zip(table.contents(), before):
        np.testing.assert_array_equal(found, expected)


def test_the_table_must_be_a_table_of_the_engine():
    one, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(64),
        tf.tpu.experimental.embedding.SGD(0.1),
    )
    one.build()
    engine = [one._state.backend.engine.handle]
    table = Table(16, [16])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"`table_index` must be in \[0, 1"
    ):
        table.write([1], engine=engine, table_index=1)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="`vocabulary_buckets` must be at most 8, as in the engine",
    ):
        table.write([1], engine=engine)
    assert (table.keys[0].numpy() == bucket_layout.EMPTY_KEY).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"begin": -1}, r"a range in \[0, 8\]. Received: -1, 8"),
        ({"end": 9}, r"a range in \[0, 8\]. Received: 0, 9"),
        ({"begin": 5, "end": 4}, "Received: 5, 4"),
        ({"dims": [DIM]}, "`dims` must have one value for each of 2 `values`"),
        ({"dims": [DIM, 2]}, "words"),
        ({"Tvalues": [tf.float32, tf.int32]}, "words"),
        ({"Tvalues": [tf.float32], "dims": [DIM]}, "Table 'words' needs"),
    ],
)
def test_an_invalid_read_raises(arguments, message):
    table = Table(8, [8])
    table.write([1, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        table.read(**arguments)


def test_a_read_of_a_table_with_too_few_rows_raises():
    table = Table(8, [8])
    table.write(np.arange(40))
    table.rows = [tf.Variable(tf.zeros([8, DIM]))]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"must have a row for each key. Received: 8 rows \(table",
    ):
        table.read()
