"""The programs in `tools` run as files, without an installed package."""

import os
import pathlib
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


# Programs that import only the standard library and files of the repository.
@pytest.mark.parametrize(
    "name", ["mutations.py", "page_widths.py", "sample_sentences.py"]
)
def test_a_program_in_tools_runs_as_a_file(name, tmp_path):
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    ended = subprocess.run(
        [sys.executable, "-S", TOOLS / name, "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "usage:" in ended.stdout
