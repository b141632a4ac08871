"""Records of a server, compared with sets and numpy copies of its shards."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tf_layoutmap._core import ops
from tf_layoutmap.embedding.servers import closures

InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError
NUM_ROWS, DIMS = [70, 5], [3, 2]
SETTINGS = {
    "tables": ["ads", "words"],
    "table_numbers": [0, 1],
    "first_rows": [10, 0],
    "dims": DIMS,
    "dtypes": [tf.float32, tf.bfloat16],
    "optimizers": ["adagrad", "none"],
    "num_hyperparameters": [1, 0],
}


class Server:
    """A server with a float32 shard and a 16-bit shard."""

    def __init__(self):
        self.shards = [
            tf.Variable(tf.cast(cases.floats(*shape, seed=seed), dtype))
            for seed, (shape, dtype) in enumerate(
                zip(zip(NUM_ROWS, DIMS), SETTINGS["dtypes"])
            )
        ]
        self.slots = [tf.Variable(cases.floats(NUM_ROWS[0], DIMS[0], seed=7))]
        self.applied = tf.Variable(tf.zeros([closures.NUM_APPLIED], tf.int64))
        self.handle = ops.create_server(
            shards=cases.handles(self.shards),
            slots=cases.handles(self.slots),
            rounding_steps=[],
            state=[],
            fetched_steps=[],
            applied=self.applied.handle,
            **SETTINGS,
        )

    def take(self, watch, also=((), ()), **changes):
        """Returns the rows and the values of both shards."""
        return [
            one.numpy()
            for one in ops.take_server_rows(
                **{
                    "server": self.handle,
                    "watch": watch,
                    "also": [tf.constant(one, tf.int64) for one in also],
                    "shards": cases.handles(self.shards),
                    "slots": cases.handles(self.slots),
                    "lanes": [],
                    "Tvalues": [
                        tf.int64,
                        tf.float32,
                        tf.float32,
                        tf.int64,
                        tf.bfloat16,
                    ],
                    **changes,
                }
            )
        ]

    def record(self, rows, piece=0):
        ops.record_server_rows(
            server=self.handle, rows=tf.constant(rows, tf.int64), piece=piece
        )


rows_of_shards = st.tuples(
    *(st.lists(st.integers(0, size - 1), max_size=9) for size in NUM_ROWS)
)


@given(st.lists(st.tuples(rows_of_shards, rows_of_shards), max_size=4))
def test_changed_rows_equal_numpy(calls):
    server = Server()
    # Rows before the watch are not recorded.
    server.record([3])
    watch = ops.watch_server_rows(server=server.handle)
    for recorded, also in calls:
        for piece, rows in enumerate(recorded):
            server.record([*rows, -1], piece)
        found = server.take(watch, also)
        expected = [
            np.unique([*one, *other]).astype(np.int64)
            for one, other in zip(recorded, also)
        ]
        first, second = expected
        np.testing.assert_array_equal(found[0], first)
        np.testing.assert_array_equal(found[1], server.shards[0].numpy()[first])
        np.testing.assert_array_equal(found[2], server.slots[0].numpy()[first])
        np.testing.assert_array_equal(found[3], second)
        np.testing.assert_array_equal(
            found[4].view(np.uint16),
            server.shards[1].numpy()[second].view(np.uint16),
        )
    assert [len(one) for one in server.take(watch)] == [0] * 5


def test_a_failed_call_keeps_the_rows():
    server = Server()
    watch = ops.watch_server_rows(server=server.handle)
    server.record([3, 69])
    with pytest.raises(InvalidArgument, match="must be of dtype"):
        server.take(watch, Tvalues=[tf.int64] * 5)
    with pytest.raises(InvalidArgument, match="must contain rows of table 1"):
        server.take(watch, [[], [5]])
    with pytest.raises(InvalidArgument, match="`slots`"):
        server.take(watch, slots=[])
    with pytest.raises(InvalidArgument, match="`lanes`"):
        server.take(watch, lanes=cases.handles(server.slots))
    assert server.take(watch)[0].tolist() == [3, 69]


def test_a_later_watch_replaces_a_watch():
    server = Server()
    first = ops.watch_server_rows(server=server.handle)
    server.record([3])
    second = ops.watch_server_rows(server=server.handle)
    with pytest.raises(FailedPrecondition, match="only the latest watch"):
        server.take(first)
    assert server.take(second)[0].tolist() == []


@pytest.mark.parametrize(("rows", "piece"), [([70], 0), ([0], 2)])
def test_invalid_rows_and_shards_raise(rows, piece):
    server = Server()
    ops.watch_server_rows(server=server.handle)
    with pytest.raises(InvalidArgument, match="must be"):
        server.record(rows, piece)


def test_a_retired_server_raises_until_it_is_not_retired():
    server = Server()
    watch = ops.watch_server_rows(server=server.handle)
    ops.retire_server(server=server.handle)
    for call in (
        lambda: server.take(watch),
        lambda: server.record([1]),
        lambda: ops.fetch_server_rows(
            server=server.handle, request=tf.zeros([12], tf.uint8)
        ),
        lambda: ops.apply_rows(
            server=server.handle, request=tf.zeros([12], tf.uint8)
        ),
    ):
        with pytest.raises(FailedPrecondition, match="was resized"):
            call()
    ops.retire_server(server=server.handle, retired=False)
    server.record([1])
    assert server.take(watch)[0].tolist() == [1]


def test_evicted_rows_of_a_table_without_keys_are_empty():
    server = Server()
    ops.keep_evicted_rows(server=server.handle, piece=1)
    following, keys, values = ops.read_evicted_rows(
        server=server.handle,
        reported=tf.constant(0, tf.int64),
        piece=1,
        max_bytes=100,
        Tvalues=[tf.bfloat16],
    )
    assert (int(following), len(keys)) == (0, 0)
    assert values[0].shape == [0, DIMS[1]]
    with pytest.raises(InvalidArgument, match="owns an open vocabulary"):
        ops.evict_server_keys(
            server=server.handle,
            keys=tf.constant([1], tf.int64),
            piece=0,
            expired=False,
            only_check=False,
        )
