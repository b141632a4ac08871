"""TensorFlow's own lookup functions work on sharded tables."""

import numpy as np
import pytest
import tensorflow as tf

from tests.sharded.tables import make_table

IDS = tf.SparseTensor(
    [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [3, 0]], [9, 0, 4, 9, 4, 1], [5, 3]
)
WEIGHTS = tf.SparseTensor(
    IDS.indices, [1.0, 2.0, -1.0, 4.0, 0.5, 1.0], IDS.dense_shape
)
HOLES = tf.SparseTensor(IDS.indices, [9, -1, 4, -3, 4, -2], IDS.dense_shape)


def eager_and_traced(function, *args, **options):
    return (
        function(*args, **options),
        tf.function(lambda: function(*args, **options))(),
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "ids",
    [
        7,
        [7, 0, 4],
        [[7, 0], [4, 4]],
        np.zeros((0,), np.int64),
        np.array([9, 9], np.int64),
    ],
)
@pytest.mark.parametrize(
    "lookup",
    [
        lambda table, ids: tf.gather(table, ids),
        lambda table, ids: tf.gather(table, ids, axis=-2, name="rows"),
        lambda table, ids: tf.nn.embedding_lookup(table, ids),
        lambda table, ids: tf.nn.embedding_lookup([table], ids, name="rows"),
        lambda table, ids: tf.nn.embedding_lookup(table, ids, max_norm=2.0),
        lambda table, ids: tf.gather(table, [1, 0], axis=1),
    ],
    ids=["gather", "axis", "lookup", "list", "max_norm", "columns"],
)
def test_lookups_match_a_single_tensor(values, sizes, lookup, ids):
    table = make_table(values, sizes)
    wanted = lookup(tf.constant(values), ids)
    for found in eager_and_traced(lookup, table, ids):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "lookup",
    [
        tf.nn.embedding_lookup,
        tf.compat.v1.nn.embedding_lookup,
        tf.gather,
        lambda table, ids: tf.gather(table, ids, axis=1),
    ],
    ids=["lookup", "v1", "gather", "columns"],
)
def test_ragged_ids_return_ragged_rows(values, sizes, lookup):
    ids = tf.ragged.constant([[1], [], [0, 1]])
    wanted = lookup(tf.constant(values), ids).to_list()
    for found in eager_and_traced(lookup, make_table(values, sizes), ids):
        assert found.to_list() == wanted


@pytest.mark.covering(2)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 3.0}], ids=["", "norm"])
def test_sparse_lookups_match_a_single_tensor(
    values, sizes, combiner, weights, options
):
    table = make_table(values, sizes)
    for lookup, extra in [
        (tf.nn.embedding_lookup_sparse, {}),
        (tf.nn.safe_embedding_lookup_sparse, {}),
        (tf.nn.safe_embedding_lookup_sparse, {"default_id": 3}),
    ]:
        ids = IDS if lookup is tf.nn.embedding_lookup_sparse else HOLES
        wanted = lookup(
            tf.constant(values),
            ids,
            weights,
            combiner=combiner,
            **options,
            **extra,
        )
        for found in eager_and_traced(
            lookup, table, ids, weights, combiner=combiner, **options, **extra
        ):
            np.testing.assert_array_equal(found, wanted)


def test_ragged_sparse_lookup_matches_a_single_tensor(values, sizes):
    ids = tf.ragged.constant([[9, 0], [4], [4, 4, 1]])
    np.testing.assert_array_equal(
        tf.nn.embedding_lookup_sparse(
            make_table(values, sizes), ids, None, combiner="sum"
        ),
        tf.nn.embedding_lookup_sparse(
            tf.constant(values), ids, None, combiner="sum"
        ),
    )


def test_invalid_ids_raise_with_the_table_name(values, sizes):
    table = make_table(values, sizes)
    bad = tf.SparseTensor([[0, 0]], [10], [1, 1])
    for lookup in (
        lambda: tf.gather(table, [10]),
        lambda: tf.nn.embedding_lookup(table, [10]),
        lambda: tf.nn.embedding_lookup_sparse(table, bad, None),
        lambda: tf.nn.safe_embedding_lookup_sparse(table, bad),
    ):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match="Id 10 .* is outside table 'emb'",
        ):
            lookup()


def test_unsupported_types_raise(values):
    table = make_table(values, [4, 6])
    with pytest.raises(TypeError, match="`sp_ids`.*SparseTensor"):
        tf.nn.embedding_lookup_sparse(table, [1], None)
    with pytest.raises(ValueError, match="one table.*2 tables"):
        tf.nn.embedding_lookup([table, table], [1])


def test_an_eager_lookup_does_not_concatenate_the_shards(values, monkeypatch):
    table = make_table(values, [4, 6])
    from tf_layoutmap.sharded import indexing

    monkeypatch.setattr(indexing, "dense", None)
    for lookup in (tf.gather, tf.nn.embedding_lookup):
        np.testing.assert_array_equal(lookup(table, [9]), values[[9]])
    tf.nn.embedding_lookup_sparse(table, IDS, None)
    tf.nn.safe_embedding_lookup_sparse(table, IDS)
