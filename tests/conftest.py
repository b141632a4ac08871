"""What all tests share. Cheap on purpose: TensorFlow is not imported here."""

import os
import pathlib
import sys

import hypothesis
import pytest

# TensorFlow's start-up notes would bury the one line that matters.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Deterministic by default: the same examples in every run and on every
# machine. TF_LAYOUTMAP_EXPLORE=1 draws new ones, and more of them. No
# deadline, because the first call of an op pays for tracing.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None,
    max_examples=50)
hypothesis.settings.register_profile(
    "explore", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(
    "explore" if os.environ.get("TF_LAYOUTMAP_EXPLORE") == "1" else "fixed")

ROOT = pathlib.Path(__file__).parents[1]


def long_files() -> list[str]:
    """Files of tests that take longest, the longest first."""
    lines = (ROOT / "tests" / "long_files.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def pytest_collection_modifyitems(config, items):
    """Where files run at the same time, long ones start first."""
    if hasattr(config, "workerinput"):  # A worker of pytest-xdist.
        files = {ROOT / file: -number for number, file in
                 enumerate(reversed(long_files()), 1)}
        items.sort(key=lambda item: files.get(item.path, 0))


@pytest.fixture(autouse=True)
def no_mesh_left_behind():
    """Clears a default mesh that outlived its test.

    `dtensor.default_mesh` of TensorFlow 2.21, which `dtensor.relayout` uses
    too, stays set when an error leaves it. The next test would run on a mesh.
    """
    yield
    api = sys.modules.get("tensorflow.dtensor.python.api")
    mesh = api and api.get_default_mesh()
    if mesh is not None:
        api._dtensor_device()._current_default_mesh = None
        with api.default_mesh(mesh):  # Leaving it clears what was set.
            pass
