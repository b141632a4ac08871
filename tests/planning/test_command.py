"""`python -m tf_layoutmap plan` prints and writes the plan of a model."""

import json
import re

import pytest

import tf_layoutmap as tlm
from tf_layoutmap import __main__ as main_module
from tf_layoutmap.planning import command, costs, probe

MODULE = """
import tensorflow as tf
import keras

def tables():
    tpu = tf.tpu.experimental.embedding
    return {
        "words": tpu.FeatureConfig(tpu.TableConfig(40_000, 16, name="words"))
    }

SIZE = 3

def sized(rows):
    return tables()

def text():
    return "words"

def broken():
    return 1 / 0

def model():
    return keras.Sequential([keras.Input([16]), keras.layers.Dense(64)])
"""


@pytest.fixture(autouse=True)
def planned_module(tmp_path, monkeypatch):
    (tmp_path / "planned_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(costs.CACHE_VARIABLE, str(tmp_path / "costs.json"))
    monkeypatch.setattr(
        probe, "measure", lambda *_: tlm.planning.MachineCosts.typical()
    )
    # The devices of a test process are already set.
    monkeypatch.setattr(command, "_prepare_devices", lambda count: None)


def test_a_plan_for_servers_is_printed_and_written(tmp_path, capsys):
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = [
        "planned_module:tables",
        "--num-servers",
        "2",
        "--memory",
        "3MiB",
    ]
    arguments += ["--optimizer", "adagrad", "--pin", "words=rows"]
    arguments += [
        "--explain",
        "words",
        "--html",
        str(page),
        "--json",
        str(file),
    ]
    assert main_module.main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "for 2 servers" in printed
    assert "The planner stores 'words'" in printed
    assert "<!doctype html>" in page.read_text(encoding="utf-8")
    plan = tlm.planning.Plan.from_dict(
        json.loads(file.read_text(encoding="utf-8"))
    )
    assert plan.choices == {"words": "rows over 2 servers"}


def test_a_plan_for_a_mesh_is_printed(capsys):
    arguments = ["planned_module:model", "--devices", "2", "--memory", "1MiB"]
    assert command.main([*arguments, "--optimizer", "sgd"]) == 0
    assert "a mesh {'model': 2}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--memory", "1KiB"], "No plan fits"),
        (["--memory", "1GiB", "--optimizer", "adamw"], "sgd, adagrad, adam"),
        (["--memory", "1GiB", "--pin", "words"], "NAME=CHOICE"),
        (["--memory", "1GiB", "--explain", "wrods"], "'wrods'"),
        (["--memory", "1 gigs"], "`memory`"),
        (
            ["--memory", "1GiB", "--mesh", "model=2"],
            "--num-servers or --num-workers",
        ),
        (["--memory", "1GiB", "--html", "no/such/folder/x.html"], "no/such"),
        ([], "--memory 16GiB"),
    ],
)
def test_errors_are_printed(arguments, words, capsys):
    assert command.main(["planned_module:tables", *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "target, words",
    [
        ("planned_module", "module:function"),
        ("planed_module:tables", "no module 'planed_module'.*PYTHONPATH"),
        ("planned_module:tabels", "Did you mean planned_module:tables?"),
        ("planned_module:SIZE", "no function 'SIZE'"),
        ("planned_module:sized", "Received: arguments rows"),
        ("planned_module:text", "feature_config"),
    ],
)
def test_a_wrong_target_is_an_error(target, words, capsys):
    assert command.main([target, "--memory", "1MiB"]) == 1
    assert re.search(words, capsys.readouterr().err)


def test_a_model_without_a_mesh_is_an_error(capsys):
    assert command.main(["planned_module:model", "--memory", "1MiB"]) == 1
    assert "--mesh batch=2,model=4" in capsys.readouterr().err


def test_errors_of_the_function_are_raised():
    with pytest.raises(ZeroDivisionError):
        command.main(["planned_module:broken", "--memory", "1MiB"])


@pytest.mark.parametrize(
    "option", ["--devices", "--num-servers", "--batch-size"]
)
def test_numbers_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        command.main(["planned_module:tables", option, "0"])
    assert "at least 1. Received: '0'" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["model", "model=0", "=2", "a=2,b"])
def test_wrong_meshes_end_the_command(mesh, capsys):
    with pytest.raises(SystemExit):
        command.main(["planned_module:model", "--mesh", mesh])
    assert "batch=2,model=4" in capsys.readouterr().err
