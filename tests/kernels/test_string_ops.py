"""Ops that keep the strings of keys match a reference in plain Python."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import vocabulary as reference
from tf_layoutmap._core import ops
from tf_layoutmap.vocabulary import bucket_layout


class Pair:
    """A store with the keys of a vocabulary, and its reference."""

    def __init__(self, capacity, num_shards=1):
        self.model = reference.Vocabulary(capacity)
        self.strings = reference.Strings(self.model)
        self.partition = bucket_layout.bucket_partition(
            self.model.num_buckets, min(num_shards, self.model.num_buckets)
        )
        self.keys = [
            tf.Variable(tf.zeros([size, 8], tf.int64))
            for size in self.partition.sizes
        ]
        self.store = ops.create_string_store()
        self._update_keys()

    def _update_keys(self):
        keys = self.model.state()["keys"].reshape([-1, 8])
        for variable, first in zip(self.keys, self.partition.offsets):
            variable.assign(keys[first : first + variable.shape[0]])

    def add_rows(self, keys):
        self.model.write(keys, 1)
        self._update_keys()

    def evict(self, keys):
        self.model.evict(keys, 2)
        self._update_keys()

    def keep(self, ids, texts, **changed):
        arguments = {
            "store": self.store,
            "training": tf.constant(True),
            "shards": [one.handle for one in self.keys],
            "offsets": self.partition.offsets,
            "keys": [tf.constant(ids, tf.int64)],
            "strings": [tf.constant(texts, tf.string)],
            "table": "words",
            **changed,
        }
        ops.keep_strings(**arguments)

    def names(self):
        keys = [key for key, *_ in self.model.export()]
        found = ops.read_strings(
            store=self.store, keys=tf.constant(keys, tf.int64)
        )
        return [
            text if is_known else None
            for text, is_known in zip(
                found.strings.numpy().tolist(), found.is_known.numpy()
            )
        ]

    def describe(self):
        return ops.describe_strings(store=self.store)


texts = st.binary(max_size=3)


@given(
    capacity=st.integers(1, 90),
    num_shards=st.integers(1, 4),
    known=st.lists(st.integers(-4, 12), unique=True),
    batches=st.lists(
        st.lists(st.tuples(st.integers(-4, 12), texts), max_size=12),
        max_size=5,
    ),
)
def test_the_first_string_of_each_key_with_a_row_is_kept(
    capacity, num_shards, known, batches
):
    pair = Pair(capacity, num_shards)
    pair.add_rows(known)
    for batch in batches:
        keys = [key for key, _ in batch]
        strings = [text for _, text in batch]
        pair.keep(keys, strings)
        pair.strings.keep(keys, strings)
        assert pair.names() == pair.strings.names()
    found = pair.describe()
    collisions = pair.strings.collisions
    assert found.num_strings == sum(
        one is not None for one in pair.strings.names()
    )
    assert found.num_collisions == sum(collisions.values())
    pairs = {(kept, other) for kept, other in found.collisions.numpy().tolist()}
    assert pairs <= set(collisions)
    assert len(pairs) == min(len(collisions), 16)


def test_several_inputs_of_any_shape_are_kept():
    pair = Pair(20)
    pair.add_rows([1, 2, 3])
    pair.keep(
        [],
        [],
        keys=[
            tf.constant([[1], [2]], tf.int64),
            tf.constant([3, 9], tf.int64),
            tf.zeros([0], tf.int64),
        ],
        strings=[
            tf.constant([["a"], ["b"]]),
            tf.constant(["c\0d", "no row"]),
            tf.zeros([0], tf.string),
        ],
    )
    assert sorted(pair.names()) == [b"a", b"b", b"c\0d"]
    assert pair.describe().num_bytes == 5


def test_a_forward_step_keeps_nothing():
    pair = Pair(8)
    pair.add_rows([1])
    pair.keep([1], ["a"], training=tf.constant(False))
    assert pair.names() == [None]


def test_strings_of_evicted_keys_are_removed():
    pair = Pair(64)
    for first in range(0, 64 * 100, 32):
        keys = list(range(first, first + 32))
        pair.add_rows(keys)
        pair.keep(keys, [str(key) for key in keys])
        assert pair.names() == [
            str(key).encode() for key, *_ in pair.model.export()
        ]
        pair.evict(keys)
        # At most one half of the strings of a full table is kept longer.
        assert pair.describe().num_strings <= 96
    pair.keep([], [], removes_all=True)
    assert pair.describe().num_strings == 0
    assert pair.describe().num_bytes == 0


def test_loaded_strings_replace_all_strings():
    pair = Pair(8)
    pair.add_rows([1, 2])
    pair.keep([1, 1], ["a", "b"])
    ops.load_strings(
        store=pair.store,
        keys=tf.constant([2, 7], tf.int64),
        strings=tf.constant(["two", "seven"]),
    )
    expected = {1: None, 2: b"two"}
    assert pair.names() == [expected[key] for key, *_ in pair.model.export()]
    found = pair.describe()
    assert (found.num_strings, found.num_collisions) == (2, 0)


def test_the_order_of_large_batches_determines_the_kept_string():
    """The batch is large enough for several threads."""
    pair = Pair(512)
    pair.add_rows(range(400))
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 500, 100_000)
    strings = [f"{key} {i % 3}".encode() for i, key in enumerate(keys)]
    for _ in range(2):
        pair.keep(keys, strings)
        pair.strings.keep(keys.tolist(), strings)
    assert pair.names() == pair.strings.names()
    collisions = pair.strings.collisions
    assert pair.describe().num_collisions == sum(collisions.values())


@pytest.mark.parametrize("op", ["keep_strings", "load_strings"])
def test_other_numbers_of_strings_raise(op):
    pair = Pair(8)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="one string for each of the 2 keys. Received: 1 strings",
    ):
        if op == "keep_strings":
            pair.keep([1, 2], ["a"])
        else:
            ops.load_strings(
                store=pair.store,
                keys=tf.constant([1, 2], tf.int64),
                strings=tf.constant(["a"]),
            )


def test_keys_of_another_shape_raise():
    pair = Pair(8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="words.*shard 0"):
        pair.keep([1], ["a"], shards=[tf.Variable([1]).handle])


_LOGS = """
import tensorflow as tf
from tests.kernels.test_string_ops import Pair
pair = Pair(8)
pair.add_rows([1])
for text in ("first", 'sec"ond', "third", "first"):
    pair.keep([1], [text])
"""


@pytest.mark.exhaustive
def test_a_collision_is_logged_once():
    """Runs in another process, because the tests do not show warnings."""
    found = subprocess.run(
        [sys.executable, "-c", _LOGS],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    ).stderr
    assert found.count("have the same hash") == 1
    assert 'Table \'words\': the strings "first" and "sec\\"ond"' in found
