"""`python -m tf_layoutmap` reports versions and runs a self-check."""

import functools
import os
import platform
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap import distribution, process_report
from tf_layoutmap._core import keras_private, ops, patches, requirements


def started(program="", *, without=()):
    """Runs `program`, then `python -m tf_layoutmap` as its main module."""
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DTENSOR_")
    }
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import runpy, sys\n{hidden}{program}\n"
            "runpy.run_module('tf_layoutmap', run_name='__main__')",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_the_report_has_versions_and_a_self_check_and_exits_with_0():
    ended = subprocess.run(
        [sys.executable, "-m", "tf_layoutmap"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    facts = dict(
        line.split(":", 1) for line in ended.stdout.splitlines() if ":" in line
    )
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["tf_layoutmap"] == (
        f"{tlm.__version__}, built for TensorFlow {ops.BUILT_FOR}"
    )
    # The report also lists the packages that contain the module.
    assert facts["TensorFlow"].startswith(f"{tf.__version__} (installed: ")
    assert f" {tf.__version__})" in facts["TensorFlow"]
    assert facts["Keras"] == keras.__version__
    assert facts["numpy"] == np.__version__
    assert facts["protobuf"][0].isdigit()
    assert facts["tf_keras"][0].isdigit() or facts["tf_keras"] == (
        "not installed"
    )
    assert facts["Python"].startswith(platform.python_version())
    assert "libc" in facts["Platform"]
    assert ops.native.cpu_level() in facts["Processors"]
    # The self-check runs, because the process has at least two devices.
    assert facts["Keras functions"] == "as tested"
    assert facts["Self-check"].startswith("ok: 4 of 4 reads returned")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_failed_self_check_exits_with_1():
    # DTensor reads this switch once. `import tf_layoutmap` does not change
    # switches that the user has set.
    ended = started("""
import os
os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = "1"
os.environ["DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE"] = "0"
""")
    assert ended.returncode == 1, ended.stdout
    assert "Self-check failed: DTensor must run without" in ended.stderr
    assert f"TensorFlow:     {tf.__version__}" in ended.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "missing, sentence",
    [
        (
            "tensorflow",
            f'pip install "tensorflow-cpu=={requirements.built_for()}.*"',
        ),
        ("keras", 'pip install "keras>=3.12,<3.17"'),
    ],
)
def test_a_missing_package_is_reported_with_the_other_facts(missing, sentence):
    ended = started(without=[missing])
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"numpy:          {np.__version__}" in ended.stdout
    title = {"tensorflow": "TensorFlow", "keras": "Keras"}[missing]
    assert f"{title + ':':<16}not installed" in ended.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_unsupported_version_of_keras_is_reported():
    ended = started('import keras\nkeras.__version__ = "3.11.3"')
    assert ended.returncode == 1
    assert "Received: Keras 3.11.3." in ended.stderr
    assert "Keras:          3.11.3" in ended.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_report_has_both_versions_of_tensorflow():
    ended = started('import tensorflow\ntensorflow.__version__ = "2.19.1"')
    assert ended.returncode == 1
    assert f"built for TensorFlow {ops.BUILT_FOR}, native parts not loaded" in (
        ended.stdout
    )
    assert "TensorFlow:     2.19.1 (installed: " in ended.stdout
    assert "Received: TensorFlow 2.19.1." in ended.stderr


def user_function(*args, **kwargs):
    """Represents user code, because tests are not part of the package."""


def test_replaced_names_are_found_everywhere(monkeypatch):
    before = set(process_report.replaced_names())
    ours = tlm.process.describe  # This can be any function of the package.

    @functools.wraps(keras.layers.Dense.call)
    def wrapped(*args, **kwargs):
        return user_function(*args, **kwargs)

    wrapped.__wrapped__ = ours
    monkeypatch.setattr(keras.layers.Dense, "call", wrapped)
    monkeypatch.setattr(keras.layers.Conv2D, "build", user_function)
    monkeypatch.setattr(keras_private.backend_nn, "relu", ours)
    monkeypatch.setattr(keras.Variable, "value", property(ours))
    found = set(process_report.replaced_names()) - before
    assert any("Dense.call" in name for name in found)
    assert any("Variable.value" in name for name in found)
    assert any(name.split(" ")[0].endswith(".relu") for name in found)
    assert not any("Conv2D" in name for name in found)
    report = tlm.process.describe()
    assert all(name in report for name in found)


def test_replaced_functions_of_the_installed_keras_are_known():
    assert process_report.unknown_functions() == []


def test_a_function_that_differs_from_the_tested_one_is_named(
    tmp_path, monkeypatch
):
    table = process_report.KERAS_DIGESTS.read_text()
    digest = process_report.keras_digests()["optimizers.Adagrad.update_step"]
    changed = tmp_path / "digests.csv"
    changed.write_text(table.replace(digest, "00000000"))
    monkeypatch.setattr(process_report, "KERAS_DIGESTS", changed)
    assert process_report.unknown_functions() == [
        f"optimizers.Adagrad.update_step of Keras {keras.__version__} "
        f"(digest {digest})"
    ]


def test_a_digest_does_not_change_while_a_function_is_replaced():
    before = process_report.keras_digests()
    with distribution.enabled():
        assert process_report.keras_digests() == before


def test_digests_do_not_require_tf_keras(monkeypatch):
    entries_of = patches.entries_of

    def without_tf_keras(group):
        assert "tf_keras" not in patches._HOMES[group]
        return entries_of(group)

    expected = process_report.keras_digests()
    monkeypatch.setattr(patches, "entries_of", without_tf_keras)
    assert process_report.keras_digests() == expected
