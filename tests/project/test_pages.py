"""Checks statements about the project on pages and in settings files."""

import ast
import pathlib
import re

import pytest

from tf_layoutmap import _version
from tf_layoutmap._core import requirements

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted((ROOT / "tf_layoutmap").rglob("*.py"))

# Each of these modules can execute code that is contained in its input data.
UNPICKLERS = {
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "shelve",
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_from_data(source: str) -> list[str]:
    """Returns the code in a Python source that can execute data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            found += sorted(names & UNPICKLERS)
        elif isinstance(node, ast.ImportFrom):
            found += sorted({(node.module or "").split(".")[0]} & UNPICKLERS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += sorted({node.func.id} & {"eval", "exec"})
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(node.arg)
    return found


def test_the_search_finds_pickles():
    assert code_from_data("import pickle as p\nfrom dill import loads") == [
        "pickle",
        "dill",
    ]
    assert code_from_data("np.load(f, allow_pickle=True)\neval(x)") == [
        "eval",
        "allow_pickle",
    ]


def test_data_is_never_run_as_code():
    assert "do not use `pickle`" in text_of("SECURITY.md")
    assert SOURCES
    assert {
        path.relative_to(ROOT).as_posix(): found
        for path in SOURCES
        if (found := code_from_data(path.read_text()))
    } == {
        # TensorFlow generates this code from the ops of this package.
        "tf_layoutmap/_core/ops.py": ["exec"]
    }


def test_the_table_of_versions_matches_the_checked_versions():
    ours = requirements.minor(_version.__version__)
    row = next(
        line
        for line in text_of("docs/versions.md").splitlines()
        if line.startswith(f"| {ours},")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == [
        " and ".join(requirements.TENSORFLOW),
        f"{requirements.KERAS[0]} to {requirements.KERAS[-1]}",
        " and ".join(requirements.TF_KERAS),
        "3.11 to 3.13",
    ]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_the_table_of_versions_is_linked(name):
    assert "(docs/versions.md)" in text_of(name)


def test_pre_commit_hooks_match_make_lint():
    lint = text_of("Makefile").partition("\nlint: ")[2].partition("\n\n")[0]
    commands = (
        lint.replace("$(VENV)", ".venv")
        .replace("$(RUN)", ".venv/bin/python")
        .splitlines()[1:]
    )
    hooks = re.findall(r"entry: (.*)", text_of(".pre-commit-config.yaml"))
    assert len(hooks) == 5
    for hook in hooks:
        assert any(
            f"{line.strip()} ".startswith(hook + " ") for line in commands
        ), f"`make lint` has no line `{hook}`"
