"""What all tests share. Cheap on purpose: TensorFlow is not imported here."""

import gc
import os
import pathlib
import sys

import hypothesis
import pytest

from tests import covering, long_cases

# TensorFlow's start-up notes would bury the one line that matters.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Deterministic by default: the same examples in every run and on every
# machine. TF_LAYOUTMAP_EXPLORE=1 draws new ones, and more of them. No
# deadline, because the first call of an op pays for tracing.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.register_profile(
    "explore", deadline=None, max_examples=500, print_blob=True
)
hypothesis.settings.load_profile(
    "explore" if os.environ.get("TF_LAYOUTMAP_EXPLORE") == "1" else "fixed"
)

ROOT = pathlib.Path(__file__).parents[1]


def long_files() -> list[str]:
    """Files of tests that take longest, the longest first."""
    lines = (ROOT / "tests" / "long_files.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks slow and exhaustive cases, and starts long files first.

    The order matters when files run in parallel.
    """
    covering.mark_exhaustive(items)
    slow = long_cases.read()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    if hasattr(config, "workerinput"):  # A worker of pytest-xdist.
        files = {
            ROOT / file: -number
            for number, file in enumerate(reversed(long_files()), 1)
        }
        items.sort(key=lambda item: files.get(item.path, 0))


def pytest_collection_finish():
    """Keeps what was imported out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def datasets_without_autotuning():
    """Lets iterators of tf.data end at once.

    One that autotunes waits at its end for a thread of its own, in one of
    twenty cases for as long as it was used, at most for a minute: the thread
    is woken before it can see that it was cancelled (TensorFlow 2.21).
    """
    data = sys.modules.get("tensorflow.python.data.ops.dataset_ops")
    if data is None:
        yield
        return
    options = sys.modules["tensorflow"].data.Options()
    options.autotune.enabled = False
    original = data.DatasetV2._apply_debug_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            data.DatasetV2,
            "_apply_debug_options",
            lambda dataset: original(dataset).with_options(options),
        )
        yield


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
