"""`tlm.pack` and its op, compared with a reference in plain Python."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.reference import packed as reference
from tf_layoutmap._core import ops
from tf_layoutmap.embedding import packing
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.vocabulary import key_tensors

InvalidArgument = tf.errors.InvalidArgumentError
PATHS = ["a", "b/0", "b/1"]


@st.composite
def batches(draw):
    """Draws ids of three features, and weights of some features."""
    num_samples = draw(st.integers(0, 5))
    ids, weights = [], []
    for _ in PATHS:
        sizes = draw(
            st.lists(
                st.integers(0, 4), min_size=num_samples, max_size=num_samples
            )
        )
        ids.append(
            [
                draw(
                    st.lists(st.integers(-9, 99), min_size=size, max_size=size)
                )
                for size in sizes
            ]
        )
        weights.append(
            [[draw(st.integers(1, 9)) / 2] * size for size in sizes]
            if draw(st.booleans())
            else None
        )
    return ids, weights


def ragged(rows, dtype=tf.int64):
    values = [value for row in rows for value in row]
    return tf.RaggedTensor.from_row_lengths(
        tf.constant(values, dtype, [len(values)]),
        tf.constant([len(row) for row in rows], tf.int64, [len(rows)]),
    )


def structure(leaves):
    return {"a": leaves[0], "b": [leaves[1], leaves[2]]}


@given(batch=batches(), weighted=st.booleans(), traced=st.booleans())
def test_pack_and_unpack_match_the_reference(batch, weighted, traced):
    ids, weights = batch
    call = tf.function(tlm.pack) if traced else tlm.pack
    features = structure([ragged(one) for one in ids])
    factors = structure(
        [
            None
            if one is None
            else feature.with_values(
                tf.constant(
                    [value for row in one for value in row],
                    tf.float32,
                    [feature.values.shape[0]],
                )
            )
            for one, feature in zip(weights, tf.nest.flatten(features))
        ]
    )
    found = call(features, factors) if weighted else call(features)
    mark = packing.packed_mark_of(PATHS)
    wanted = reference.pack(ids, mark, weights if weighted else None)
    packed = found[0] if weighted else found
    assert packing.is_packed(packed, [0, 1])
    assert packed.dtype == tf.int64
    assert_rows(packed, wanted[0])
    if weighted:
        assert_rows(found[1], wanted[1])
    # `read_packed` uses only TensorFlow's own ops.
    specs = [config.FeatureSpec(path, 0, 0) for path in PATHS]
    read = packing.read_packed(
        packed, found[1] if weighted else None, structure([0, 1, 2])
    )
    for one, back, factor, given_weights in zip(
        ids, *packing.unpack_ids(specs, read), weights, strict=True
    ):
        assert back.to_list() == one
        if weighted:
            assert factor.to_list() == (
                given_weights or [[1.0] * len(row) for row in one]
            )


@given(
    batch=batches(),
    are_strings=st.tuples(*[st.booleans()] * len(PATHS)),
    traced=st.booleans(),
)
def test_packed_strings_match_the_reference(batch, are_strings, traced):
    ids, weights = batch
    features, hashes = [], []
    for rows, is_string in zip(ids, are_strings, strict=True):
        integers = ragged(rows)
        strings = tf.ragged.map_flat_values(tf.strings.as_string, integers)
        keys = tf.ragged.map_flat_values(key_tensors.hash_strings, strings)
        features.append(strings if is_string else integers)
        hashes.append((keys if is_string else integers).to_list())
    call = tf.function(tlm.pack) if traced else tlm.pack
    packed = call(structure(features))
    mark = packing.packed_mark_of(PATHS)
    expected, _ = reference.pack(hashes, mark, are_strings=list(are_strings))
    assert_rows(packed, expected)
    specs = [config.FeatureSpec(path, 0, 0) for path in PATHS]
    read = packing.read_packed(packed, None, structure([0, 1, 2]))
    found, _ = packing.unpack_ids(specs, read, [True] * 3)
    for one, keys, is_string in zip(found, hashes, are_strings, strict=True):
        assert one.ids.to_list() == keys
        assert one.kind.numpy() == (1 + is_string if ids[0] else 0)
    if any(are_strings) and ids[0]:
        with pytest.raises(InvalidArgument, match="an open vocabulary accepts"):
            packing.unpack_ids(specs, read)


def test_all_types_of_strings_pack_to_the_same_tensor():
    dense = tf.constant([["a", "b"], ["c", ""]])
    wanted = tlm.pack({"x": dense}).numpy()
    assert wanted[:, 1].tolist() == [-3, -3]
    np.testing.assert_array_equal(
        wanted[:, 2:], key_tensors.hash_strings(dense)
    )
    for form in (
        tf.RaggedTensor.from_tensor(dense),
        tf.SparseTensor(
            [[0, 0], [0, 1], [1, 0], [1, 1]], ["a", "b", "c", ""], [2, 2]
        ),
        dense.numpy(),
        np.array([["a", "b"], ["c", ""]]),
    ):
        np.testing.assert_array_equal(tlm.pack({"x": form}), wanted)
    packed = tlm.pack([dense, tf.constant([5, 6])])
    assert packed[:, 2].numpy().tolist() == [1, 1]


def test_samples_of_different_kinds_raise():
    packed = tf.concat(
        [tlm.pack([tf.constant(["a"])]), tlm.pack([tf.constant([1])])], axis=0
    )
    read = packing.read_packed(packed, None, [0])
    with pytest.raises(InvalidArgument, match="either integers in all samples"):
        packing.unpack_ids([config.FeatureSpec("0", 0, 0)], read, [True])


def assert_rows(found, rows):
    np.testing.assert_array_equal(
        found, np.array(rows, found.dtype.as_numpy_dtype).reshape(found.shape)
    )
    assert found.shape[0] == len(rows)


@given(batch=batches(), data=st.data())
def test_pack_ids_op_matches_the_reference(batch, data):
    ids, weights = batch
    num_samples = len(ids[0])
    dense = data.draw(st.integers(0, 3))
    ids.append([[7] * dense] * num_samples)
    num_columns = data.draw(st.sampled_from([0, 20, 30]))
    flat = [ragged(one) for one in ids]
    found = ops.pack_ids(
        ids=[one.values for one in flat],
        splits=[*(one.row_splits for one in flat[:3]), np.zeros(0, np.int64)],
        num_samples=[num_samples] * 4,
        weights=[
            np.array([value for row in one or () for value in row], np.float32)
            for one in [*weights, None]
        ],
        names=["a", "b", "c", "d"],
        mark=-5,
        weighted=True,
        num_columns=num_columns,
    )
    wanted = reference.pack(
        ids,
        -5,
        [one if one and any(one) else None for one in [*weights, None]],
        num_columns,
    )
    for one, other in zip(found, wanted, strict=True):
        assert_rows(one, other)
        assert one.shape[1] == num_columns or not num_columns


def test_all_input_types_pack_to_the_same_tensor():
    dense = tf.constant([[1, 2], [3, 4]], tf.int32)
    wanted = tlm.pack({"x": dense}).numpy()
    np.testing.assert_array_equal(wanted[:, 1:], [[2, 1, 2], [2, 3, 4]])
    for form in (
        tf.RaggedTensor.from_tensor(dense),
        tf.sparse.from_dense(dense),
        np.array([[1, 2], [3, 4]], np.uint8),
    ):
        np.testing.assert_array_equal(tlm.pack({"x": form}), wanted)
    np.testing.assert_array_equal(
        tlm.pack([tf.constant([5, 6], tf.int64)])[:, 1:], [[1, 5], [1, 6]]
    )


def test_static_shapes_while_tracing():
    def packed_of(*specs, **options):
        return (
            tf.function(lambda *ids: tlm.pack(list(ids), **options))
            .get_concrete_function(*specs)
            .output_shapes.as_list()
        )

    dense, unknown_batch = (
        tf.TensorSpec([4, 2], tf.int64),
        tf.TensorSpec([None, 2], tf.int64),
    )
    some = tf.RaggedTensorSpec([4, None], tf.int64)
    assert packed_of(dense, dense) == [4, 7]
    assert packed_of(unknown_batch, dense) == [4, None]
    assert packed_of(some) == [4, None]
    assert packed_of(some, num_columns=9) == [4, 9]


def test_datasets_can_rebatch_packed_samples():
    ids = {"x": np.arange(12), "y": np.arange(24).reshape(12, 2)}
    dataset = tf.data.Dataset.from_tensor_slices(ids).batch(4).map(tlm.pack)
    small = list(dataset.rebatch(3))
    assert [one.shape[0] for one in small] == [3] * 4
    halves = list(dataset.unbatch().batch(6))
    for parts in (small, halves):
        np.testing.assert_array_equal(tf.concat(parts, 0), tlm.pack(ids))


@pytest.mark.parametrize(
    "features, weights, error, match",
    [
        ({}, None, ValueError, "at least one feature"),
        (tf.zeros([2], tf.int64), None, ValueError, "a single tensor"),
        ({"x": tf.zeros([2])}, None, TypeError, "'x' must be integers"),
        (
            {"x": tf.zeros([2, 3, 4], tf.int64)},
            None,
            ValueError,
            r"'x' of a packed batch .* \(2, 3, 4\)",
        ),
        (
            {"x": tf.sparse.from_dense(tf.ones([2, 3, 4], tf.int64))},
            None,
            ValueError,
            "'x' of a packed batch",
        ),
        (
            {"x": ragged([[1], [2]])},
            {"x": tf.ones([2])},
            ValueError,
            "does not match type input",
        ),
        ({"x": ragged([[1], [2]])}, {"y": None}, ValueError, "structure of"),
        (
            {"x": tf.zeros([2], tf.int64), "y": tf.zeros([3], tf.int64)},
            None,
            InvalidArgument,
            "same number of samples.*'x' with 2, feature 'y' with 3",
        ),
        ({"x": "text"}, None, ValueError, "unknown type"),
        # The second sample has a gap before its first id, which is in column 1.
        (
            {"x": tf.SparseTensor([[0, 0], [1, 1]], [4, 5], [2, 2])},
            None,
            InvalidArgument,
            "not right-ragged",
        ),
    ],
)
def test_invalid_features_raise(features, weights, error, match):
    with pytest.raises(error, match=match):
        tlm.pack(features, weights)


def test_invalid_row_splits_raise():
    bad = tf.RaggedTensor.from_row_splits(
        tf.zeros([3], tf.int64), tf.constant([0, 5], tf.int64), validate=False
    )
    with pytest.raises(InvalidArgument, match="'x': row_splits must end"):
        tlm.pack({"x": bad})


def test_sample_with_too_many_columns_raises():
    with pytest.raises(InvalidArgument, match="at least .* 4. .*: 3"):
        tlm.pack([ragged([[1], [2, 3]])], num_columns=3)


@pytest.mark.parametrize(
    "column, value, match",
    [
        (0, 3, "packed from a structure"),
        (1, -1, "at least 0"),
        (2, 9, "inside its columns"),
        (1, 2**62, "inside its columns"),
    ],
)
def test_unpacking_a_modified_batch_raises(column, value, match):
    ids = tlm.pack([ragged([[1], [2]]), ragged([[3], []])]).numpy()
    ids[1, column] = value
    specs = [config.FeatureSpec(path, 0, 0) for path in "01"]
    with pytest.raises(InvalidArgument, match=match):
        packing.unpack_ids(specs, packing.read_packed(ids, None, [0, 1]))


_WORKER = """
import sys
import tensorflow as tf
import tf_layoutmap as tlm

tlm.pack  # Loads the library, as the guide says.
service = tf.data.experimental.service
worker = service.WorkerServer(
    service.WorkerConfig(dispatcher_address=sys.argv[1])
)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.exhaustive
def test_a_worker_of_the_data_service_packs():
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout.readline() == "started\n"
        ids = {"x": np.arange(4).reshape(2, 2)}
        (packed,) = (
            tf.data.Dataset.from_tensor_slices(ids)
            .batch(2)
            .map(tlm.pack)
            .apply(
                service.distribute(
                    service.ShardingPolicy.OFF, dispatcher.target
                )
            )
        )
        worker.kill()
    np.testing.assert_array_equal(packed, tlm.pack(ids))
