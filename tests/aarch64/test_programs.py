"""Programs compute the same numbers on aarch64 as on this machine.

`make test-aarch64` runs this file with an interpreter for aarch64, which QEMU
emulates.
"""

import os
import pathlib
import platform
import subprocess
import sys
import tempfile

import numpy as np
import pytest

# The interpreter for aarch64. Its environment has the wheel for aarch64.
OTHER = os.environ.get("TF_LAYOUTMAP_AARCH64_PYTHON")
ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("programs.py")
NAMES = ["tables", "fitted", "mesh", "sharded_variable", "export"]
# Relative to the largest number of an array. Operations of TensorFlow add
# numbers in different orders.
TOLERANCE = 1e-5

needs_aarch64 = pytest.mark.skipif(
    OTHER is None, reason="needs the interpreter of `make test-aarch64`"
)


def numbers(python, name, folder):
    """Returns the arrays that a program writes."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    path = folder / f"{name}.npz"
    environment = dict(os.environ)
    # The program on this machine uses the checkout, the other one its wheel.
    environment.pop("PYTHONPATH", None)
    if python == sys.executable:
        environment["PYTHONPATH"] = str(ROOT)
    subprocess.run(
        [python, str(PROGRAM), str(path), name],
        cwd=folder,
        env=environment,
        check=True,
    )
    with np.load(path) as file:
        return dict(file)


@needs_aarch64
def test_the_interpreter_and_its_libraries_are_for_aarch64():
    code = (
        "import platform, tf_layoutmap; from tf_layoutmap._core import ops;"
        "print(platform.machine(), ops.native.__file__)"
    )
    printed = subprocess.run(
        [OTHER, "-c", code],
        env={**os.environ, "PYTHONPATH": ""},
        cwd=pathlib.Path(OTHER).parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    machine, path = printed.split()[-2:]
    assert machine == "aarch64" != platform.machine()
    assert path.endswith("-aarch64-linux-gnu.so")


@needs_aarch64
@pytest.mark.parametrize("name", NAMES)
def test_a_program_computes_the_same_numbers(name, tmp_path):
    here = numbers(sys.executable, name, tmp_path)
    there = numbers(OTHER, name, tmp_path)
    assert here.keys() == there.keys()
    differences = {
        key: np.max(np.abs(here[key] - there[key])) / np.max(np.abs(here[key]))
        for key in here
        if here[key].tobytes() != there[key].tobytes()
    }
    print(f"{name}: {len(here)} arrays, different: {differences}")
    assert not [key for key in differences if key.startswith("exact")]
    assert max(differences.values(), default=0.0) < TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_program_computes_the_same_numbers_again(name, tmp_path):
    """Otherwise, a comparison of two machines would show nothing."""
    first = numbers(sys.executable, name, tmp_path)
    again = numbers(sys.executable, name, tmp_path)
    for key, one in first.items():
        assert one.tobytes() == again[key].tobytes(), key
        assert np.any(one) and np.isfinite(one).all(), key
