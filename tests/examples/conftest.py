"""Puts the programs' folder on the path, as running one of them does."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="module")
def start(request):
    """Returns what starts the `PROGRAM` of a test module, as a person does.

    It takes the arguments, and returns the process when it has ended, with
    what it printed.
    """
    program = str(EXAMPLES / request.module.PROGRAM)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, program, *map(str, arguments)],
            capture_output=True, text=True, timeout=300, check=False)

    return run
