"""The examples run on a machine with GPUs.

`make test-gpu` runs the snippets of the documentation in the same way.
"""

import os
import subprocess
import sys

import pytest

from tests.accelerators import fake_gpu

EXAMPLES = fake_gpu.ROOT / "examples"
# The programs and the arguments that make them short.
PROGRAMS = {
    "two_tower.py": [],
    "handwritten_digits.py": [],
    "nightly_deltas.py": [],
    "one_program_three_runtimes.py": [],
    "keras_hub_on_a_mesh.py": [],
    "dlrm.py": [
        "--model_dir=model",
        "--max_lines=3000",
        "--batch_size=64",
        "--dim=8",
    ],
    "sharded_transformer.py": ["--model_dir=model", "--epochs=1"],
    "next_identifier.py": [
        "--model_dir=model",
        "--steps=60",
        "--batch_size=256",
    ],
}
# Other examples start these programs.
STARTED_BY_EXAMPLES = {"elsewhere.py", "nightly_deltas_server.py"}


def test_each_example_is_listed():
    programs = {
        path.name
        for path in EXAMPLES.glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    assert programs - STARTED_BY_EXAMPLES == set(PROGRAMS)


# Each program takes half a minute.
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [1, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_runs_with_gpus(program, num_gpus, tmp_path):
    path = str(fake_gpu.library())
    command = [sys.executable, "-m", "tests.accelerators.example_program"]
    command += [path, str(num_gpus), str(EXAMPLES / program)]
    done = subprocess.run(
        [*command, *PROGRAMS[program]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(fake_gpu.ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
