"""`python -m tf_layoutmap advise` prints a report and changes nothing."""

import json
import pathlib
import re

import keras
import pytest
import tf_keras

from tf_layoutmap import __main__ as command
from tf_layoutmap.layers import advise


def model_of(version):
    return version.Sequential(
        [
            version.Input([2], dtype="int64"),
            version.layers.Embedding(2000, 4, name="words"),
            version.layers.Flatten(),
        ]
    )


@pytest.mark.parametrize("version", [keras, tf_keras])
def test_a_saved_model_is_described(version, tmp_path, capsys):
    path = str(tmp_path / "model.keras")
    model_of(version).save(path)
    assert command.main(["advise", path]) == 0
    printed = capsys.readouterr().out
    assert "Replaced: 1 Embedding layers" in printed
    assert "Expected time" in printed


def test_the_model_of_a_function_is_described(tmp_path, monkeypatch, capsys):
    (tmp_path / "advised_module.py").write_text(
        "from tests.layers.test_advise import model_of\n"
        "import keras\n"
        "def make():\n"
        "    return model_of(keras)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["advised_module:make", "--json", "--min-rows", "5000"]
    assert advise.main(arguments) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert not layer["is_replaced"] and "5,000 rows" in layer["reason"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("model", "a .keras file or module:function"),
        ("missing.keras", "does not exist"),
        ("text.keras", "must be a file that `model.save`"),
        ("no_such_module:make", "found no module 'no_such_module'"),
        ("tests.layers.test_advise:modle_of", "Did you mean.*model_of"),
    ],
)
def test_another_target_prints_an_error(
    target, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.keras").write_text("text")
    assert command.main(["advise", target]) == 1
    assert re.search(words, capsys.readouterr().err)


def test_an_unknown_command_returns_2(capsys):
    assert command.main(["advice"]) == 2
    assert "Usage" in capsys.readouterr().err
