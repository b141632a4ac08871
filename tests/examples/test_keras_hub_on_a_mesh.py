"""`keras_hub_on_a_mesh.py` matches a single device and shards its weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "keras_hub_on_a_mesh.py"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_mesh_trains_as_one_device_and_shards_the_weights(start):
    pytest.importorskip("keras_hub")
    ended = start("--steps=24", "--layers=1")
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = ended.stdout
    rows = re.findall(
        r"(?:one device|mesh) +│ +([\d.]+) │ +([\d.]+) │ +([\d.]+)%", printed
    )
    (first, last, accuracy), on_mesh = (list(map(float, row)) for row in rows)
    assert last < first and accuracy > 30
    # Devices of a mesh add numbers in a different order.
    assert on_mesh == pytest.approx([first, last, accuracy], abs=2e-4)
    once = int(re.search(r"unsharded +│ (\d+) KiB", printed)[1])
    fullest = int(re.search(r"fullest device +│ (\d+) KiB", printed)[1])
    assert fullest < 0.4 * once


def test_mesh_that_does_not_divide_the_heads_raises(start):
    ended = start("--mesh=1x3")
    assert ended.returncode != 0
    assert "must divide the number of attention heads, 4" in ended.stderr


def test_missing_keras_hub_is_reported_in_a_sentence():
    program = str(EXAMPLES / PROGRAM)
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import runpy, sys\n"
            "sys.modules['keras_hub'] = None\n"
            f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
            f"sys.argv = [{program!r}]\n"
            f"runpy.run_path({program!r}, run_name='__main__')\n",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "requires keras-hub" in ended.stderr
    assert "pip install keras-hub" in ended.stderr
    assert "Traceback" not in ended.stderr
