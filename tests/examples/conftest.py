"""Puts the programs' folder on the path, as running one of them does."""

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
    """Returns what starts the `PROGRAM` of a test module, as a person does.

    It takes the arguments, and returns the process when it has ended, with
    what it printed.
    """
    program = str(EXAMPLES / request.module.PROGRAM)

    def run(*arguments):
        return forked_process.run([program, *map(str, arguments)], seconds=300)

    return run


@pytest.fixture
def refusal(capsys):
    """Returns what says why a run, in this process, cannot go on.

    It takes the call that a program makes below its flags. To start the
    program for each refusal would import TensorFlow for each.
    """
    from completion.data.corpus import DataError
    from ending import in_a_sentence

    def said(call):
        with pytest.raises(SystemExit) as ended, in_a_sentence(DataError):
            call()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return said


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Real text: two packages that every Python brings."""
    folder = tmp_path_factory.mktemp("sources")
    for package in ("asyncio", "email"):
        shutil.copytree(
            Path(sysconfig.get_path("stdlib"), package), folder / package
        )
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("model")
