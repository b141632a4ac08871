"""Tests that `tf_layoutmap` does not change programs that do not use it.

Each program runs in a process that never imports this package, and in a second
process. Before the program runs, the second process trains models on a mesh,
reads tables and installs all patches. Two effects on the whole process are not
compared. `enable_missing_ops` adds rules to DTensor, so that operations without
rules run instead of raising. Importing this package disables passes of DTensor
that compute wrong numbers; both processes run without these passes.
"""

import json
import os

import pytest

from tests import covering, forked_process, processes
from tests.stock import (  # noqa: F401 - the imports register programs.
    in_graphs,
    of_keras,
    of_operations,
    of_strategies,
    on_a_mesh,
    outcome,
)
from tf_layoutmap.layout import dtensor_switches

# Each of the two processes trains a hundred small models, which takes one
# minute of CPU time.
pytestmark = pytest.mark.slow

SECONDS = 1200


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """Returns the outcomes of the selected programs, plain and patched."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    folder = tmp_path_factory.mktemp("stock")
    env = {**os.environ, **dtensor_switches.SAFE}
    logs = [folder / kind for kind in ("plain", "patched")]
    running = []
    try:
        for log in logs:
            running.append(
                forked_process.ForkedProcess(
                    ["-m", "tests.stock.run", log.name, *names],
                    log,
                    errors=log.with_suffix(".err"),
                    env=env,
                    cwd=processes.ROOT,
                )
            )
        for process, log in zip(running, logs):
            code = process.wait(SECONDS)
            assert code == 0, (
                f"{code} after {log.read_text()[-200:]}: "
                f"{log.with_suffix('.err').read_text()[-3000:]}"
            )
    finally:
        for process in running:
            process.kill()
            process.wait()
    plain, patched = (
        {
            name: rest
            for name, *rest in (
                json.loads(line.removeprefix("FOUND "))
                for line in log.read_text().splitlines()
                if line.startswith("FOUND ")
            )
        }
        for log in logs
    )
    return plain, patched


def differences(plain, patched, where=""):
    """Returns the differences of two outcomes, as paths and values."""
    if (
        isinstance(plain, dict)
        and isinstance(patched, dict)
        and (plain.keys() == patched.keys())
    ):
        pairs = [(key, plain[key], patched[key]) for key in plain]
    elif (
        isinstance(plain, list)
        and isinstance(patched, list)
        and (len(plain) == len(patched))
    ):
        pairs = list(zip(range(len(plain)), plain, patched))
    else:
        return (
            []
            if plain == patched and type(plain) is type(patched)
            else [f"{where}: {str(plain)[:300]} is now {str(patched)[:300]}"]
        )
    return [
        one
        for key, first, second in pairs
        for one in differences(first, second, f"{where}/{key}")
    ]


@pytest.mark.covering(1, 8)
@pytest.mark.parametrize(
    "name", covering.but(outcome.PROGRAMS, *outcome.EXHAUSTIVE)
)
def test_a_program_has_the_same_outcome_with_patches(name, found):
    plain, patched = (outcomes[name] for outcomes in found)
    assert not differences(plain[0], patched[0])
    assert patched[1] == []


def test_differences_of_outcomes_are_found():
    first = {"a": [1, {"error": "ValueError", "line": "N"}]}
    assert not differences(
        first, {"a": [1, {"error": "ValueError", "line": "N"}]}
    )
    for other in (
        {"a": [1, {"error": "TypeError", "line": "N"}]},
        {"b": []},
        {"a": [1]},
        {"a": [True, {"error": "ValueError", "line": "N"}]},
    ):
        assert len(differences(first, other)) == 1
