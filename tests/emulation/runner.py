"""Runs a test module in a process of its own.

Kernels for TensorFlow's ops are registered for good, so the emulation must not
come into the process of other tests; and a process emulates one TPU.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Finds this checkout, from any directory."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "TF_LAYOUTMAP_PROGRAM": "1", "PYTHONPATH": path}


def run(path: str, *arguments: str, seconds: int = 300,
        **variables: str) -> str:
    """Runs a file below tests/ with pytest; its output, if all passed.

    The file finds `variables` in its environment.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
         str(ROOT / "tests" / path), *arguments], cwd=ROOT,
        env={**environment(), **variables}, text=True, capture_output=True,
        timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout
