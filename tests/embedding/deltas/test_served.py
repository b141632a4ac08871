"""Tests the how-to page's functions, which run without tf_layoutmap."""

import hashlib
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.deltas import cases

PAGE = pathlib.Path(__file__).parents[3] / "docs/howto/update_a_served_model.md"


@pytest.fixture(scope="module")
def server():
    """Returns the functions of the how-to page."""
    (code,) = re.findall(
        r"^SERVER = '''\n(.*?)^'''", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert "tf_layoutmap" not in code and "tlm" not in code
    names = {}
    exec(code, names)
    return names


class Served(tf.Module):
    """Module that serves the closed and the open table of `cases`."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def lookup(self, words, kinds):
        return self.embedding({"word": words, "kind": kinds})


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_served_model_matches_the_trained_model(num_shards, server, tmp_path):
    one = cases.embedding(num_shards=num_shards)
    for step in range(6):
        cases.train(one, step)
    base = cases.save(one, tmp_path / "base")
    tf.saved_model.save(Served(one), str(tmp_path / "model"))
    served = tf.saved_model.load(str(tmp_path / "model"))
    writer = tlm.DeltaWriter(one, tmp_path / "deltas", base=base)
    fingerprint = hashlib.sha256(
        pathlib.Path(f"{base}.index").read_bytes()
    ).hexdigest()
    last, inputs = (
        None,
        (tf.range(300, dtype=tf.int64), tf.range(40, dtype=tf.int64)),
    )
    for step in range(6, 18, 3):
        for number in range(step, step + 3):
            cases.train(one, number)
        one.vocabularies["words"].evict(one.vocabularies["words"].keys()[::9])
        writer.write()
        path, last = server["next_delta"](
            str(tmp_path / "deltas"), fingerprint, last
        )
        for table, variables in served.embedding._variables.items():
            server["apply_delta"](
                path,
                table,
                variables["parameters"],
                variables.get("vocabulary_keys"),
            )
        wanted = one({"word": inputs[0], "kind": inputs[1]})
        found = served.lookup(*inputs)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value)
        assert np.any(found["word"][:, 0] == 0) and np.any(found["word"])
    assert (
        server["next_delta"](str(tmp_path / "deltas"), fingerprint, last)
        is None
    )


@pytest.fixture(scope="module")
def two_deltas(tmp_path_factory):
    """Returns a folder with two deltas, and their base's fingerprint."""
    where = tmp_path_factory.mktemp("deltas")
    one = cases.embedding()
    base = cases.save(one, where / "base")
    writer = tlm.DeltaWriter(one, where / "deltas", base=base)
    for step in range(2):
        cases.train(one, step)
        writer.write()
    return where / "deltas", hashlib.sha256(
        pathlib.Path(f"{base}.index").read_bytes()
    ).hexdigest()


@pytest.fixture
def read_next(server, two_deltas, tmp_path):
    """Returns a function that reads the next delta of `tmp_path / "copy"`."""
    shutil.copytree(two_deltas[0], tmp_path / "copy")
    return lambda last, base=two_deltas[1]: server["next_delta"](
        str(tmp_path / "copy"), base, last
    )


def test_a_server_rejects_a_delta_out_of_sequence(read_next, tmp_path):
    _, first = read_next(None)
    with pytest.raises(ValueError, match="00000002 does not follow"):
        read_next({**first, "seal": "another"})
    data = tmp_path / "copy" / "00000002" / "delta.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match="data.* was truncated or altered"):
        read_next(first)


def test_a_server_rejects_deltas_of_another_base(read_next):
    _, first = read_next(None)
    for last in (None, first):
        with pytest.raises(ValueError, match="000. belongs to another base"):
            read_next(last, base="0" * 64)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta["tables"]["words"].update(to_step=7),
        lambda meta: meta["tables"].pop("kinds"),
        lambda meta: meta.update(base="0" * 64),
        lambda meta: meta["files"].clear(),
        lambda meta: meta.update(seal="0" * 64),
        lambda meta: meta.pop("seal"),
        lambda meta: meta.update(format=3),
        lambda meta: meta.update(more=1),
    ],
)
def test_a_server_rejects_a_modified_meta_file(change, read_next, tmp_path):
    file = tmp_path / "copy" / "00000001" / "meta.json"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="00000001/meta.json was altered"):
        read_next(None)


def test_a_server_rejects_a_truncated_meta_file(read_next, tmp_path):
    file = tmp_path / "copy" / "00000001" / "meta.json"
    file.write_text(file.read_text()[:40])
    with pytest.raises(ValueError):
        read_next(None)
