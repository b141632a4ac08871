"""Public signatures have types, and pyright finds mistakes in user programs."""

import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.public import symbols

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("typed_program.py")

# Methods whose result has the structure of the feature config, of which
# `TPUEmbeddingV2` has five, results of user-defined functions, and the dicts of
# Keras' `get_config`.
MAX_WITH_ANY = 20


def public_callables():
    """Returns functions, constructors and methods of the package by name.

    A function with several names is listed once.
    """
    found = {}
    for path, module in symbols.public_modules().items():
        for name in sorted(module.__all__):
            value = getattr(module, name)
            members = (
                _members(value) if isinstance(value, type) else {"": value}
            )
            for member, function in members.items():
                if inspect.isfunction(function):
                    full = f"{path}.{name}.{member}".removesuffix(".")
                    found.setdefault(inspect.unwrap(function), full)
    return {name: function for function, name in found.items()}


def _members(cls):
    """Returns the functions that classes of this package define."""
    found = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "tf_layoutmap":
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") or name in ("__init__", "__call__"):
                function = getattr(member, "__func__", member)
                found.setdefault(name, function)
    return found


def missing_types(function):
    """Returns the parameters without a type, or whose type contains `Any`."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    found = [
        one.name
        for one in parameters
        if one.annotation is one.empty or _has_any(one.annotation)
    ]
    return found + ["return"] * _has_any(signature.return_annotation)


def _has_any(annotation):
    return re.search(r"\bAny\b", str(annotation)) is not None


def test_missing_types_are_found():
    def typed(a: int, *, b: "str | None" = None) -> list[int]:
        return [a, b]

    def untyped(a, b: "dict[str, Any]", c: int) -> "Any":  # noqa: F821
        return a, b, c

    assert missing_types(typed) == []
    assert missing_types(untyped) == ["a", "b", "return"]


def test_few_public_callables_have_any_in_their_signature():
    functions = public_callables()
    assert len(functions) > 137
    assert {
        "tlm.export",
        "tlm.ShardedVariable.create",
        "tlm.layers.TPUEmbedding.__init__",
        "tlm.layers.ShardedEmbedding.__call__",
        "tlm.ps.Run.__init__",
    } <= set(functions)
    offenders = {
        name: missing
        for name, function in functions.items()
        if (missing := missing_types(function))
    }
    assert len(offenders) <= MAX_WITH_ANY, "\n".join(
        [
            f"{len(offenders)} callables have no type or `Any`, more than "
            f"{MAX_WITH_ANY}:"
        ]
        + [f"{name}: {', '.join(found)}" for name, found in offenders.items()]
    )


# Importing the layers imports both Keras versions.
@pytest.mark.parametrize("version", ["keras3", "tf_keras"])
@pytest.mark.parametrize("layer", ["TPUEmbedding", "ShardedEmbedding"])
def test_signatures_of_layers_list_their_arguments(version, layer):
    module = symbols.public_modules()[
        "tlm.layers" if version == "keras3" else "tlm.layers.tf_keras"
    ]
    parameters = inspect.signature(getattr(module, layer)).parameters
    assert {"optimizer", "partitioner", "kwargs"} < set(parameters)
    assert "args" not in parameters
    assert "LayerOptions" in str(parameters["kwargs"].annotation)


# pyright reads TensorFlow and Keras, which takes 2 to 6 seconds.
@pytest.mark.slow
def test_pyright_finds_each_mistake_in_a_user_program(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed; it is in the extra `develop`.")
    # The program is outside of the project, so that pyright does not read the
    # project's settings and stubs, which users do not have.
    (tmp_path / "program.py").write_text(PROGRAM.read_text())
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)]})
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--outputjson",
            "--pythonpath",
            sys.executable,
            "--project",
            str(tmp_path),
        ],
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    messages = json.loads(done.stdout)["generalDiagnostics"]
    found = [one["range"]["start"]["line"] + 1 for one in messages]
    planted = [
        number
        for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
        if "# Mistake: " in line
    ]
    assert len(planted) == 9
    assert sorted(found) == planted, "\n".join(
        f"{one['range']['start']['line'] + 1}: {one['message']}"
        for one in messages
    )
