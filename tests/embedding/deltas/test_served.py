"""The functions of the how-to page, which a server has instead of us."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.deltas import cases

PAGE = pathlib.Path(__file__).parents[3] / "docs/howto/update_a_served_model.md"


@pytest.fixture(scope="module")
def server():
    """What the page says a server needs; none of it is ours."""
    code, = re.findall(r"^SERVER = '''\n(.*?)^'''", PAGE.read_text(),
                       re.MULTILINE | re.DOTALL)
    assert "tf_layoutmap" not in code and "tlm" not in code
    names = {}
    exec(code, names)
    return names


class Served(tf.Module):
    """Both tables of the cases, closed and open."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def lookup(self, words, kinds):
        return self.embedding({"word": words, "kind": kinds})


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_served_model_answers_as_the_one_that_trains(
        num_shards, server, tmp_path):
    one = cases.embedding(num_shards=num_shards)
    for step in range(6):
        cases.train(one, step)
    base = cases.save(one, tmp_path / "base")
    tf.saved_model.save(Served(one), str(tmp_path / "model"))
    served = tf.saved_model.load(str(tmp_path / "model"))
    writer = tlm.DeltaWriter(one, tmp_path / "deltas", base=base)
    last, asked = None, (tf.range(300, dtype=tf.int64),
                         tf.range(40, dtype=tf.int64))
    for step in range(6, 18, 3):
        for number in range(step, step + 3):
            cases.train(one, number)
        one.vocabularies["words"].evict(
            one.vocabularies["words"].keys()[::9])
        writer.write()
        path, last = server["next_delta"](str(tmp_path / "deltas"), last)
        for table, variables in served.embedding._variables.items():
            server["apply_delta"](
                path, table, variables["parameters"],
                variables.get("vocabulary_keys"))
        wanted = one({"word": asked[0], "kind": asked[1]})
        found = served.lookup(*asked)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value)
        assert np.any(found["word"][:, 0] == 0) and np.any(found["word"])
    assert server["next_delta"](str(tmp_path / "deltas"), last) is None


def test_a_server_refuses_what_does_not_follow(server, tmp_path):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.DeltaWriter(one, tmp_path, base=base)
    for step in range(2):
        cases.train(one, step)
        writer.write()
    _, first = server["next_delta"](str(tmp_path), None)
    with pytest.raises(ValueError, match="00000002 does not follow"):
        server["next_delta"](str(tmp_path), {**first, "seal": "another"})
    data = tmp_path / "00000002" / "delta.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match="delta.data.* was cut or altered"):
        server["next_delta"](str(tmp_path), first)
