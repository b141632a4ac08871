"""Tests the errors, files and report of `tlm.export`."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import peak_memory
from tests.files import full_disk, snapshots
from tests.serving import served as helpers
from tf_layoutmap.serving import sources

tpu = tf.tpu.experimental.embedding


def embedding_of(rows, **kwargs):
    return tlm.TPUEmbedding(
        {"x": tpu.FeatureConfig(helpers.table_of(rows, "words"))},
        None,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            dict(row_format="int3"),
            ValueError,
            "`row_format` must be one of .*'int3'",
        ),
        (dict(row_format={"words": "int2"}), ValueError, "of table 'words'"),
        (
            dict(row_format={"sentences": "int8"}),
            ValueError,
            r"must name tables of \['words'\]. Received: "
            r"\['sentences'\]",
        ),
        (dict(fuse=1), TypeError, "`fuse` must be a bool"),
        (
            dict(dataset=[1]),
            ValueError,
            "`dataset` must be None unless the model is comp",
        ),
        (
            dict(input_signature=tf.TensorSpec([None])),
            TypeError,
            "`input_signature` must be a list",
        ),
        (
            dict(input_signature=[{"x": 3}]),
            TypeError,
            "must contain tf.TensorSpec",
        ),
        (
            dict(input_signature=[{"y": tf.TensorSpec([None], tf.int64)}]),
            ValueError,
            r"\['x'\]. Received: 'y'",
        ),
    ],
)
def test_invalid_arguments_raise_and_write_nothing(
    kwargs, error, message, tmp_path
):
    with pytest.raises(error, match=message):
        tlm.export(
            embedding_of(helpers.make_rows(4, 8)), tmp_path / "model", **kwargs
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "subject", [3, keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])]
)
def test_a_subject_without_tables_raises(subject, tmp_path):
    with pytest.raises(TypeError, match="must be a tlm.TPUEmbedding, or a"):
        tlm.export(subject, tmp_path / "model")


def test_an_unbuilt_layer_raises(tmp_path):
    layer = tlm.layers.ShardedEmbedding(4, 4, name="words")
    with pytest.raises(ValueError, match="Layer 'words' must be built"):
        tlm.export(layer, tmp_path / "model")


def test_a_single_layer_is_exported(tmp_path):
    layer = tlm.layers.ShardedEmbedding(4, 4, name="words")
    wanted = layer(np.array([[3, 0]]))
    with pytest.raises(ValueError, match="`input_signature` must be given"):
        tlm.export(layer, tmp_path / "model")
    _, served = helpers.export(
        layer, tmp_path, input_signature=[tf.TensorSpec([None, None], tf.int64)]
    )
    np.testing.assert_array_equal(served.serve([[3, 0]]), wanted)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_non_finite_row_raises_and_leaves_no_files(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 64)
    rows = helpers.make_rows(1000, 4)
    rows[777, 2] = np.nan
    embedding = embedding_of(rows)
    report, _ = helpers.export(embedding, tmp_path)
    with pytest.raises(
        ValueError,
        match="Table 'words' cannot be stored as "
        f"{kind}: row 777 holds nan in column 2",
    ):
        tlm.export(embedding, tmp_path / "model", kind)
    # The failed export must not change the existing model.
    served = tf.saved_model.load(report.path)
    found = served.serve({"x": tf.ragged.constant([[777]], tf.int64)})["x"]
    np.testing.assert_array_equal(found[0], rows[777])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="new, empty or a SavedModel"):
        tlm.export(embedding_of(helpers.make_rows(4, 8)), tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def answer(path):
    served = tf.saved_model.load(str(path))
    return (
        served.serve({"x": tf.ragged.constant([[1]], tf.int64)})["x"]
        .numpy()
        .tolist()
    )


@pytest.mark.parametrize(
    "target", ["current", "current/", "folder/current", "models//../current"]
)
def test_a_link_is_kept_and_its_target_is_replaced(
    target, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first, second = (helpers.make_rows(4, 8, seed) for seed in (0, 1))
    tlm.export(embedding_of(first), "models/1")
    tlm.export(embedding_of(first), "models/2/")
    (tmp_path / "current").symlink_to("models/1")
    (tmp_path / "folder").symlink_to(tmp_path)
    report = tlm.export(embedding_of(second), target)
    assert os.readlink("current") == "models/1"
    for path in ("current", "models/1", report.path):
        assert answer(path) == [second[1].tolist()]
    assert answer("models/2") == [first[1].tolist()]
    assert sorted(os.listdir("models")) == ["1", "2"]
    assert sorted(os.listdir()) == ["current", "folder", "models"]


def test_a_link_to_other_files_is_not_replaced(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").write_text("dear")
    (tmp_path / "link").symlink_to("letters")
    with pytest.raises(ValueError, match="new, empty or a SavedModel"):
        tlm.export(embedding_of(helpers.make_rows(4, 8)), tmp_path / "link")
    assert (tmp_path / "link" / "letter.txt").read_text() == "dear"
    # If the target of a link does not exist, the export creates the target.
    (tmp_path / "next").symlink_to("new/1")
    tlm.export(embedding_of(helpers.make_rows(4, 8)), tmp_path / "next")
    assert (tmp_path / "next").is_symlink()
    assert (tmp_path / "new" / "1" / "saved_model.pb").exists()


def test_a_full_disk_keeps_the_previous_model(tmp_path):
    rows = helpers.make_rows(4, 8)
    tlm.export(embedding_of(rows), tmp_path / "model")
    with pytest.raises(OSError, match="File too large.*model"):
        with full_disk.full_disk():
            tlm.export(embedding_of(rows + 1), tmp_path / "model")
    # Only the file with the table values, which is written in blocks, exceeds
    # this limit.
    with pytest.raises(OSError, match="File too large.*variables"):
        with full_disk.full_disk(2**20):
            tlm.export(
                embedding_of(helpers.make_rows(2**16, 8)), tmp_path / "model"
            )
    assert answer(tmp_path / "model") == [rows[1].tolist()]
    assert os.listdir(tmp_path) == ["model"]


def test_a_complete_model_exists_whenever_the_process_is_killed(
    tmp_path, monkeypatch
):
    first, second = (helpers.make_rows(4, 8, seed) for seed in (0, 1))
    tlm.export(embedding_of(first), tmp_path / "all" / "model")
    copies = snapshots.Snapshots(tmp_path / "all", tmp_path / "copies")
    with copies.of_operations(monkeypatch):
        tlm.export(embedding_of(second), tmp_path / "all" / "model")
    files = {
        name: sorted(
            (path.relative_to(one), path.read_bytes())
            for path in (one / "model").rglob("*")
            if path.is_file()
        )
        for name, one in (
            ("old", copies.folders[0]),
            ("new", copies.folders[-1]),
        )
    }
    found = []
    for one in copies.folders:
        now = sorted(
            (path.relative_to(one), path.read_bytes())
            for path in (one / "model").rglob("*")
            if path.is_file()
        )
        found.append(
            [
                name
                for name, wanted in files.items()
                if [(str(path), read) for path, read in now]
                == [(str(path), read) for path, read in wanted]
            ]
        )
    assert all(len(names) == 1 for names in found)
    assert found == sorted(found, reverse=True)
    assert answer(copies.folders[-1] / "model") == [second[1].tolist()]
    # The next export removes the files that a killed process left behind.
    left = next(one for one in copies.folders if len(os.listdir(one)) > 1)
    tlm.export(embedding_of(second), left / "model")
    assert os.listdir(left) == ["model"]


@pytest.mark.parametrize(("kind", "ratio"), [("int8", 0.30), ("int4", 0.17)])
def test_file_sizes_match_the_documented_ratio(kind, ratio, tmp_path):
    rows = helpers.make_rows(60_000, 64)
    report, _ = helpers.export(embedding_of(rows), tmp_path, kind)
    on_disk = sum(
        path.stat().st_size for path in (tmp_path / "model").rglob("*")
    )
    assert report.num_bytes <= on_disk
    assert report.num_bytes <= ratio * rows.nbytes
    (one,) = report.tables
    assert one.num_bytes <= report.num_bytes
    assert 0 < one.mean_error < one.largest_error


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("fuse", [True, False])
def test_blocks_are_concatenated_in_order(
    fuse, num_shards, tmp_path, monkeypatch
):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 80)
    rows = [helpers.make_rows(size, 4, size) for size in (57, 1, 20)]
    embedding = tlm.TPUEmbedding(
        [
            tpu.FeatureConfig(helpers.table_of(one, f"t{len(one)}"))
            for one in rows
        ],
        None,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )
    _, served = helpers.export(
        embedding,
        tmp_path,
        fuse=fuse,
        input_signature=[[tf.TensorSpec([None], tf.int64)] * 3],
    )
    found = served.serve([np.arange(len(one)) for one in rows])
    for one, wanted in zip(found, rows, strict=True):
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.exhaustive
def test_writing_allocates_memory_for_one_block(tmp_path, monkeypatch):
    assert peak_memory.is_available()
    mib = 2**20
    table = tlm.ShardedVariable.create(
        tf.random_uniform_initializer(),
        shape=[2**19, 64],
        num_shards=3,
        dtype=tf.float32,
        name="words",
    )
    layer = tlm.layers.ShardedEmbedding(
        2**19, 64, num_shards=3, name="words", embeddings_initializer="ones"
    )
    layer.build()
    layer.embeddings.assign(table)
    del table
    monkeypatch.setattr(sources, "BLOCK_BYTES", 2 * mib)
    specs = [tf.TensorSpec([None], tf.int64)]
    # The first export is not measured, because TensorFlow keeps some of its
    # memory.
    tlm.export(layer, tmp_path / "first", "int8", input_signature=specs)
    extra = peak_memory.extra_bytes(
        lambda: tlm.export(
            layer, tmp_path / "model", "int8", input_signature=specs
        )
    )
    # The table has 128 MiB, and its exported form has 36 MiB.
    assert extra < 20 * mib


def test_the_report_is_printable_and_contains_plain_data(tmp_path):
    report, _ = helpers.export(
        embedding_of(helpers.make_rows(4, 8)), tmp_path, "int8"
    )
    assert "words" in str(report)
    assert "int8" in str(report)
    assert (
        json.loads(json.dumps(report.as_dict()))["tables"][0]["num_rows"] == 4
    )


def compiled():
    ids = keras.Input([1], dtype="int64", name="ids")
    rows = tlm.layers.ShardedEmbedding(
        50, 8, optimizer="adagrad", name="words"
    )(ids)
    model = keras.Model(
        ids,
        keras.layers.Dense(1, activation="sigmoid")(
            keras.layers.Flatten()(rows)
        ),
    )
    model.compile(
        "adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")]
    )
    return model


def test_metrics_match_evaluate(tmp_path):
    model = compiled()
    random = np.random.default_rng(0)
    x = random.integers(0, 50, [200, 1])
    y = (x % 3 == 0).astype(np.float32)
    model.fit(x, y, epochs=2, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
    wanted = model.evaluate(data, verbose=0, return_dict=True)
    exact, _ = helpers.export(model, tmp_path, dataset=data)
    assert exact.metrics_before.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(exact.metrics_before[name], value, rtol=1e-5)
        np.testing.assert_allclose(exact.metrics_after[name], value, rtol=1e-5)
    coarse, _ = helpers.export(model, tmp_path, "int4", dataset=data)
    assert coarse.metrics_before == exact.metrics_before
    assert coarse.metrics_after["loss"] != exact.metrics_after["loss"]
    assert "auc: " in str(coarse)
