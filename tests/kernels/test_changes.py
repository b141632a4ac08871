"""Compares the rows that `TakeChanges` copies with numpy copies of tables."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tf_layoutmap._core import ops
from tf_layoutmap.embedding.changes import LANES, WHOLE
from tf_layoutmap.embedding.table_variable import shards_of
from tf_layoutmap.partition import FixedShardsPartitioner

tpu = tf.tpu.experimental.embedding


def embedding(num_shards):
    """Returns a 16-bit closed table, and an open table with two slots."""
    rows = tpu.TableConfig(
        70,
        3,
        initializer=tf.ones,
        combiner="sum",
        name="rows",
        optimizer=tpu.SGD(0.5),
    )
    keys = tpu.TableConfig(
        20,
        2,
        initializer=tf.ones,
        combiner="sum",
        name="keys",
        optimizer=tpu.Adam(0.5),
    )
    found = tlm.TPUEmbedding(
        {"rows": tpu.FeatureConfig(rows), "keys": tpu.FeatureConfig(keys)},
        tpu.SGD(0.5),
        table_dtypes={"rows": "bfloat16"},
        partitioner=FixedShardsPartitioner(num_shards),
        vocabularies={
            "keys": tlm.vocabulary.OpenVocabulary(
                20, admission="count", min_count=1, oov_embedding="trainable"
            )
        },
    )
    found.build()
    return found


def values(one):
    """Returns all variables; shards are concatenated to `[num_rows, ...]`."""
    found = {}
    for table, by_name in one._variables.items():
        found[table] = {}
        for name, variable in by_name.items():
            value = np.concatenate(
                [np.atleast_1d(shard.numpy()) for shard in shards_of(variable)]
            )
            found[table][name] = value.ravel() if name in LANES else value
    return found


def bits(values):
    values = np.ascontiguousarray(values)
    return values.view(np.uint8).reshape(
        len(values), values.dtype.itemsize * int(np.prod(values.shape[1:]))
    )


IDS = st.lists(st.integers(0, 69), max_size=6)
KEYS = st.lists(st.integers(-3, 60), max_size=12)


@given(
    num_shards=st.integers(1, 4),
    also=st.lists(st.integers(0, 69), max_size=4),
    program=st.lists(
        st.one_of(
            st.tuples(st.just("train"), IDS, KEYS),
            st.tuples(st.just("enqueue"), IDS, KEYS),
            st.tuples(st.just("evict"), st.just([]), KEYS),
            st.tuples(st.just("take"), st.just([]), st.just([])),
        ),
        max_size=8,
    ),
)
@settings(max_examples=15)
def test_changed_rows_are_copied_once(num_shards, also, program):
    one = embedding(num_shards)
    changes = one._state.backend.watch_changes()
    before, touched = values(one), set()
    for kind, ids, keys in [*program, ("take", [], [])]:
        if kind in ("train", "enqueue"):
            one.enqueue(
                {
                    "rows": tf.constant(ids, tf.int64),
                    "keys": tf.constant(keys, tf.int64),
                }
            )
            # This step inserts keys but does not update rows.
            if kind == "enqueue":
                one.reset()
                continue
            one.dequeue()
            one.apply_gradients(
                {
                    "rows": tf.ones([len(ids), 3]),
                    "keys": tf.ones([len(keys), 2]),
                }
            )
            touched |= set(ids)
        elif kind == "evict":
            one.vocabularies["keys"].evict(tf.constant(keys, tf.int64))
        else:
            found = changes.take({"rows": np.array(also, np.int64)})
            now = values(one)
            assert found["rows"].rows.tolist() == sorted(touched | set(also))
            for table, of_table in found.items():
                rows = of_table.rows
                for name, value in now[table].items():
                    if name in WHOLE:
                        assert (of_table.whole[name] == value).all()
                        continue
                    other = (bits(value) != bits(before[table][name])).any(1)
                    assert set(np.flatnonzero(other)) <= set(rows.tolist())
                    # These variables have no value for the row of unknown keys,
                    # so the test adds one.
                    if name in LANES:
                        value = np.append(
                            value,
                            np.array(
                                -(2**63) if LANES[name] == tf.int64 else 0,
                                value.dtype,
                            ),
                        )
                    assert (
                        bits(of_table.values[name].numpy()) == bits(value[rows])
                    ).all()
            before, touched = now, set()


def test_invalid_arguments_of_take_changes_raise():
    one = embedding(1)
    handle = one._state.backend.engine.handle
    changes = one._state.backend.watch_changes()
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=(
            "`also` must contain rows of table 1, which has 70 rows. "
            "Received: 70"
        ),
    ):
        changes.take({"rows": np.array([70])})
    shards = shards_of(one._variables["rows"]["parameters"])
    for arguments, message in (
        (
            {"shards": [one.handle for one in shards]},
            "This engine's tables need 2 `shards`. Received: 1",
        ),
        ({"open_tables": [2]}, "`open_tables` must be distinct tables of the"),
        ({"open_tables": [1, 1]}, "distinct tables of the engine. Received: 1"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            ops.take_changes(
                **{
                    "engine": handle,
                    "watch": tf.constant(1, tf.int64),
                    "also": [tf.zeros([0], tf.int64)] * 2,
                    "shards": [shards[0].handle] * 2,
                    "slots": [],
                    "lanes": [],
                    "whole": [],
                    "open_tables": [],
                    "Tvalues": [tf.int64],
                    **arguments,
                }
            )
