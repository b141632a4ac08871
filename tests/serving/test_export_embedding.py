"""Tests `tlm.export` of a `TPUEmbedding` with all input and row types."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.reference import dense_reference
from tests.serving import served as helpers

tpu = tf.tpu.experimental.embedding

KINDS = ["float32", "float16", "int8", "int4"]
BAGS = [[1, 2, 1], [], [9], [0, 4]]
WEIGHTS = [[2.0, 3.0, 1.0], [], [4.0], [-1.0, 0.5]]
DIM = 5
ROWS = helpers.make_rows(10, DIM)
RAGGED = tf.RaggedTensorSpec([None, None], tf.int64)
SPARSE = tf.SparseTensorSpec([None, None], tf.int64)


def one_table(
    combiner="sum", length=0, out_of_range="error", num_shards=1, **kwargs
):
    table = helpers.table_of(ROWS, "words", combiner=combiner)
    return tlm.TPUEmbedding(
        {"x": tpu.FeatureConfig(table, max_sequence_length=length)},
        None,
        out_of_range=out_of_range,
        partitioner=(tlm.partitioners.FixedShardsPartitioner(num_shards)),
        **kwargs,
    )


def bound(report, matrix):
    """Returns the error bound: the reported error plus float32 rounding."""
    gains = np.abs(matrix.astype(np.float64))
    return (
        gains.sum(-1, keepdims=True) * report.tables[0].largest_error
        + 1e-6 * (gains @ np.abs(ROWS))
        + 1e-30
    )


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_pooled_activations_are_within_the_reported_error(
    combiner, weighted, form, kind, tmp_path
):
    spec = RAGGED if form == "ragged" else SPARSE
    weight_spec = (
        tf.RaggedTensorSpec if form == "ragged" else tf.SparseTensorSpec
    )([None, None], tf.float32)
    specs = [{"x": spec}, {"x": weight_spec}] if weighted else [{"x": spec}]
    report, served = helpers.export(
        one_table(combiner), tmp_path, kind, input_signature=specs
    )
    ids = tf.ragged.constant(BAGS, dtype=tf.int64)
    weights = tf.ragged.constant(WEIGHTS)
    if form == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    arguments = [{"x": ids}, {"x": weights}] if weighted else [{"x": ids}]
    found = served.serve(*arguments)["x"].numpy()
    matrix = dense_reference.gain_matrix(
        dense_reference.Bag(BAGS, WEIGHTS if weighted else None), 10, combiner
    )
    difference = np.abs(found - matrix.astype(np.float64) @ ROWS)
    assert (difference <= bound(report, matrix)).all()
    assert report.tables[0].row_format == kind


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["ragged", "sparse", "dense"])
def test_sequences_keep_their_positions(form, kind, tmp_path):
    bags = [[1, 2, 1], [3, 0, 5], [9, 9, 8]] if form == "dense" else BAGS
    spec = {
        "ragged": RAGGED,
        "sparse": SPARSE,
        "dense": tf.TensorSpec([None, 3], tf.int32),
    }[form]
    report, served = helpers.export(
        one_table(length=2), tmp_path, kind, input_signature=[{"x": spec}]
    )
    ids = tf.ragged.constant(bags, dtype=tf.int64)
    ids = {
        "ragged": lambda: ids,
        "sparse": ids.to_sparse,
        "dense": lambda: tf.constant(bags),
    }[form]()
    matrix = dense_reference.sequence_matrix(dense_reference.Bag(bags), 10, 2)
    found = served.serve({"x": ids})["x"].numpy()
    difference = np.abs(found - matrix.astype(np.float64) @ ROWS)
    assert (difference <= bound(report, matrix)).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [[None], [None, 1], [None, 3], [None, 2, 2]])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_dense_ids_are_combined_along_the_last_dimension(
    combiner, shape, kind, tmp_path
):
    report, served = helpers.export(
        one_table(combiner),
        tmp_path,
        kind,
        input_signature=[{"x": tf.TensorSpec(shape, tf.int32)}],
    )
    shape = [4 if size is None else size for size in shape]
    ids = np.random.default_rng(1).integers(0, 10, shape).astype(np.int32)
    bags = ids.reshape([-1, shape[-1] if len(shape) > 1 else 1]).tolist()
    matrix = dense_reference.gain_matrix(
        dense_reference.Bag(bags), 10, combiner
    )
    found = served.serve({"x": ids})["x"].numpy()
    assert (
        found.shape == (*(shape[:-1] or shape), DIM)
        if len(shape) > 1
        else (4, DIM)
    )
    difference = np.abs(
        found.reshape([-1, DIM]) - matrix.astype(np.float64) @ ROWS
    )
    assert (difference <= bound(report, matrix)).all()


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("fuse", [False, True])
def test_float32_rows_match_the_embedding_bitwise(fuse, num_shards, tmp_path):
    embedding = one_table("mean", num_shards=num_shards)
    report, served = helpers.export(embedding, tmp_path, fuse=fuse)
    ids = {"x": tf.ragged.constant(BAGS, dtype=tf.int64)}
    np.testing.assert_array_equal(served.serve(ids)["x"], embedding(ids)["x"])
    assert report.tables[0].largest_error == 0


def test_a_folder_with_characters_of_patterns_is_written(tmp_path):
    embedding = one_table()
    folder = tmp_path / r"a[b]*?\c"
    tlm.export(embedding, folder)
    # TensorFlow cannot load a model from such a folder.
    folder.rename(tmp_path / "moved")
    served = tf.saved_model.load(tmp_path / "moved")
    ids = {"x": tf.ragged.constant(BAGS, dtype=tf.int64)}
    np.testing.assert_array_equal(served.serve(ids)["x"], embedding(ids)["x"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rows_are_exported_unchanged(dtype, tmp_path):
    embedding = one_table(table_dtypes=dtype)
    report, served = helpers.export(embedding, tmp_path)
    ids = {"x": tf.ragged.constant(BAGS, dtype=tf.int64)}
    np.testing.assert_array_equal(served.serve(ids)["x"], embedding(ids)["x"])
    assert report.tables[0].row_format == dtype
    assert report.tables[0].num_bytes == 10 * DIM * 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("out_of_range", ["drop", "clip"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_out_of_range_ids_are_dropped_or_clipped(
    combiner, out_of_range, kind, tmp_path
):
    embedding = one_table(combiner, out_of_range=out_of_range)
    report, served = helpers.export(embedding, tmp_path, kind)
    ids = {"x": tf.ragged.constant([[1, 12, 3], [-1], [10**12]], tf.int64)}
    np.testing.assert_allclose(
        served.serve(ids)["x"],
        embedding(ids)["x"],
        atol=2.5 * report.tables[0].largest_error,
        rtol=1e-6,
    )


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_samples_without_ids_return_zeros(kind, tmp_path):
    _, served = helpers.export(one_table("mean"), tmp_path, kind)
    empty = tf.ragged.constant([[], []], dtype=tf.int64, ragged_rank=1)
    assert served.serve({"x": empty})["x"].numpy().tolist() == [[0] * DIM] * 2
    none = tf.RaggedTensor.from_row_splits(
        tf.zeros([0], tf.int64), tf.zeros([1], tf.int64)
    )
    assert served.serve({"x": none})["x"].shape == [0, DIM]


def several(num_rows=(10, 3, 7), dims=(4, 4, 8), **kwargs):
    tables = [
        helpers.table_of(
            helpers.make_rows(rows, dim, seed), f"t{seed}", combiner="sum"
        )
        for seed, (rows, dim) in enumerate(zip(num_rows, dims))
    ]
    features = {
        "a": tpu.FeatureConfig(tables[0]),
        "b": [tpu.FeatureConfig(tables[1]), tpu.FeatureConfig(tables[2])],
        "c": tpu.FeatureConfig(tables[0]),
    }
    return tlm.TPUEmbedding(features, None, **kwargs)


SEVERAL_IDS = {
    "a": tf.ragged.constant([[1, 9], [0]], tf.int64),
    "b": [
        tf.ragged.constant([[2], [1, 0]], tf.int64),
        tf.ragged.constant([[], [6, 6]], tf.int64),
    ],
    "c": tf.ragged.constant([[4], []], tf.int64),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_several_tables_are_exported(kind, fuse, tmp_path):
    embedding = several()
    report, served = helpers.export(embedding, tmp_path, kind, fuse=fuse)
    assert report.num_variables == (2 if fuse else 3)
    largest = max(table.largest_error for table in report.tables)
    for found, exact in zip(
        *(
            tf.nest.flatten(x)
            for x in (served.serve(SEVERAL_IDS), embedding(SEVERAL_IDS))
        )
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-6, atol=3 * largest)


def test_one_gather_reads_all_tables_of_one_width(tmp_path):
    _, served = helpers.export(several(dims=(4, 4, 4)), tmp_path, "int8")
    assert helpers.operations_of(served.serve)["ResourceGather"] == 1


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_out_of_range_id_never_reads_the_next_table(bad, tmp_path):
    # If tables are stored in one variable, row 3 of table t1 is row 0 of the
    # next table.
    _, served = helpers.export(several(dims=(4, 4, 4)), tmp_path)
    ids = {
        **SEVERAL_IDS,
        "b": [tf.ragged.constant([[bad], []], tf.int64), SEVERAL_IDS["b"][1]],
    }
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"Feature .*b/0.*\[0, 3\).*t1.*" + str(bad),
    ):
        served.serve(ids)


def test_row_types_can_be_set_by_table(tmp_path):
    embedding = several()
    config, *_ = embedding.embedding_tables
    report, _ = helpers.export(
        embedding, tmp_path, {"t2": "int4", config: "int8"}
    )
    assert [table.row_format for table in report.tables] == [
        "int8",
        "float32",
        "int4",
    ]


def test_quantized_training_tables_are_rounded_as_in_training(tmp_path):
    table = helpers.table_of(
        ROWS,
        "words",
        combiner="sum",
        quantization_config=(
            tpu.QuantizationConfig(num_buckets=5, lower=-1.0, upper=1.0)
        ),
    )
    embedding = tlm.TPUEmbedding({"x": tpu.FeatureConfig(table)}, None)
    _, served = helpers.export(embedding, tmp_path)
    ids = {"x": tf.ragged.constant(BAGS, dtype=tf.int64)}
    np.testing.assert_array_equal(served.serve(ids)["x"], embedding(ids)["x"])


def test_the_signature_accepts_tensors_by_name(tmp_path):
    embedding = several()
    _, served = helpers.export(embedding, tmp_path)
    tensors = {}
    for name, ids in (
        ("a", SEVERAL_IDS["a"]),
        ("b_0", SEVERAL_IDS["b"][0]),
        ("b_1", SEVERAL_IDS["b"][1]),
        ("c", SEVERAL_IDS["c"]),
    ):
        tensors[f"{name}_values"] = ids.values
        tensors[f"{name}_row_splits"] = ids.row_splits
    found = served.signatures["serving_default"](**tensors)
    assert sorted(found) == ["a", "b/0", "b/1", "c"]
    np.testing.assert_array_equal(found["b/1"], embedding(SEVERAL_IDS)["b"][1])
    with pytest.raises(tf.errors.InvalidArgumentError):
        served.signatures["serving_default"](
            **{**tensors, "a_row_splits": tf.constant([0, 9, 3], tf.int64)}
        )
