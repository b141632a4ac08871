"""Unsupported versions and replaced classes raise an error at import."""

import functools
import importlib.util
import subprocess

import keras
import pytest
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import (
    keras_private,
    private_names,
    requirements,
    tf_private,
)

PrivateNames = private_names.PrivateNames


def import_again(door, package, version, monkeypatch):
    """Imports a module again, with another version of a package."""
    monkeypatch.setattr(package, "__version__", version)
    spec = importlib.util.find_spec(f"tf_layoutmap.{door}")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


KERAS = '"keras>=3.12,<3.17"'
# The version for which the libraries were built, and a version of other builds.
BUILT_FOR = requirements.built_for()
(OTHER, *_) = (one for one in requirements.TENSORFLOW if one != BUILT_FOR)


@pytest.mark.parametrize(
    "door, package, title, version, install",
    [
        *(
            ("_core.keras_private", keras, "Keras", version, KERAS)
            for version in ("3.11.3", "3.17.0", "4.0.0-dev")
        ),
        (
            "_core.tf_keras_private",
            tf_keras,
            "tf_keras",
            f"{OTHER}.1",
            f'--no-deps "tf_keras=={BUILT_FOR}.*"',
        ),
        (
            "_core.tf_keras_private",
            tf_keras,
            "tf_keras",
            "2.22.0",
            f'--no-deps "tf_keras=={BUILT_FOR}.*"',
        ),
        (
            "_core.tf_private",
            tf,
            "TensorFlow",
            f"{OTHER}.0",
            f'"tensorflow-cpu=={BUILT_FOR}.*" (or tensorflow)',
        ),
    ],
)
def test_an_unsupported_version_with_all_names_raises(
    door, package, title, version, install, monkeypatch
):
    """Functions can behave differently although all names exist."""
    with pytest.raises(ImportError) as error:
        import_again(door, package, version, monkeypatch)
    sentence = str(error.value)
    assert f"tf_layoutmap supports {title} " in sentence
    assert f"Received: {title} {version}." in sentence
    assert f"Install a supported version: pip install {install}." in sentence


@pytest.mark.parametrize("version", ["3.15.0", "3.16.7", "3.15.2-rc1"])
def test_any_patch_version_is_accepted(version):
    PrivateNames("Keras", "keras.src", version, ("3.15", "3.16"))


def test_the_installed_versions_are_supported():
    assert requirements.minor(keras.__version__) in requirements.KERAS
    assert requirements.minor(tf.__version__) == tf_private.SUPPORTED_VERSION
    assert tf_private.SUPPORTED_VERSION in requirements.TENSORFLOW


def user_function(*args, **kwargs):
    """Stands for user code that replaces a class."""


def test_a_replaced_class_raises_with_the_replacement(monkeypatch):
    owner, name = [*keras_private.MERGED_LORA.items()][-1]
    owner = owner.removeprefix("layers.")
    monkeypatch.setattr(keras.layers, owner, user_function)
    with pytest.raises(ImportError) as error:
        import_again(
            "_core.keras_private", keras, keras.__version__, monkeypatch
        )
    sentence = str(error.value)
    assert f"requires the original `keras.layers.{owner}` of Keras" in sentence
    assert f"replaced it by `{__name__}.user_function`" in sentence
    assert f"`{name}` is missing" in sentence
    assert "from tf_layoutmap import layout_map_scope" in sentence
    # Installing another version does not solve this problem, so the message
    # contains no command.
    assert "pip install" not in sentence


def names_here():
    return PrivateNames(
        "Keras", "keras.src", keras.__version__, requirements.KERAS
    )


def test_a_replaced_method_raises_with_the_replacement(monkeypatch):
    monkeypatch.setattr(keras.optimizers.Adagrad, "update_step", user_function)
    with pytest.raises(
        ImportError,
        match=(
            r"requires the original `keras.optimizers.Adagrad.update_step` of "
            r"Keras.*replaced it by .*user_function"
        ),
    ):
        names_here().check_method(
            keras.optimizers.Adagrad, "update_step", "gradient"
        )


def test_a_method_wrapped_with_functools_is_accepted(monkeypatch):
    original = keras.optimizers.Adagrad.update_step

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(keras.optimizers.Adagrad, "update_step", wrapper)
    names_here().check_method(
        keras.optimizers.Adagrad, "update_step", "gradient"
    )


def test_a_missing_method_raises_with_the_install_command():
    with pytest.raises(
        ImportError,
        match=("where `Dense.no_such_method` is missing.*pip install"),
    ):
        names_here().check_method(keras.layers.Dense, "no_such_method")


def test_the_error_for_a_newer_keras_names_the_variable_that_allows_it():
    def sentence(version):
        return str(
            requirements.other_version("keras", version, requirements.KERAS)
        )

    assert "Or set TF_LAYOUTMAP_ALLOW_UNTESTED=1" in sentence("3.17.0")
    assert "TF_LAYOUTMAP" not in sentence("3.11.3")


@pytest.mark.parametrize(
    "version, value, expected",
    [
        ("3.17.0", "1", True),
        ("4.0.0", "1", True),
        ("3.17.0", "0", False),
        ("3.17.0", None, False),
        ("3.16.2", "1", False),
        ("3.11.3", "1", False),
    ],
)
def test_only_newer_versions_can_be_allowed(
    version, value, expected, monkeypatch
):
    monkeypatch.delenv(requirements.ALLOW_UNTESTED, raising=False)
    if value is not None:
        monkeypatch.setenv(requirements.ALLOW_UNTESTED, value)
    found = private_names.is_allowed_untested(version, "3.16")
    assert found is expected


def ended(returncode, stdout="", stderr=""):
    def run(*args, **kwargs):
        return subprocess.CompletedProcess(args, returncode, stdout, stderr)

    return run


def test_an_allowed_version_is_checked_and_issues_one_warning(monkeypatch):
    monkeypatch.setenv(requirements.ALLOW_UNTESTED, "1")
    monkeypatch.setattr(subprocess, "run", ended(0, "2 not tested\n  a\n  b"))
    with pytest.warns(
        UserWarning, match=r"99\.0\.1 was not tested(.|\n)*2 not tested"
    ) as warned:
        private_names.check_untested("99.0.1", "3.16")
    assert len(warned) == 1


def test_an_allowed_version_that_fails_the_check_raises(monkeypatch):
    monkeypatch.setenv(requirements.ALLOW_UNTESTED, "1")
    monkeypatch.setattr(subprocess, "run", ended(1, stderr="slots differ."))
    with pytest.raises(ImportError, match=r"99\.0\.1: slots differ"):
        private_names.check_untested("99.0.1", "3.16")


def test_a_check_that_does_not_end_raises(monkeypatch):
    def run(*args, **kwargs):
        raise subprocess.TimeoutExpired(args, kwargs["timeout"])

    monkeypatch.setenv(requirements.ALLOW_UNTESTED, "1")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ImportError, match="did not end within"):
        private_names.check_untested("99.0.1", "3.16")
