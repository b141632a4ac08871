"""Fixtures for tests of the examples, which import modules of `examples/`."""

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import forked_process

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="module")
def start(request):
    """Returns a function that runs the `PROGRAM` of a test module.

    The function takes the arguments of the program and returns the completed
    process with its output.
    """
    program = str(EXAMPLES / request.module.PROGRAM)

    def run(*arguments):
        return forked_process.run([program, *map(str, arguments)], seconds=300)

    return run


@pytest.fixture
def error_message(capsys):
    """Returns a function that returns the error message of a run.

    The function takes a callable that runs an example. The example runs in this
    process, because a new process would import TensorFlow again.
    """
    from completion.data.corpus import DataError
    from ending import in_a_sentence

    def message_of(call):
        with pytest.raises(SystemExit) as ended, in_a_sentence(DataError):
            call()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return message_of


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Returns a folder with two packages of the standard library."""
    folder = tmp_path_factory.mktemp("sources")
    for package in ("asyncio", "email"):
        shutil.copytree(
            Path(sysconfig.get_path("stdlib"), package), folder / package
        )
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("model")
