"""Fixtures and hooks of all tests; does not import TensorFlow, to be fast."""

import gc
import os
import pathlib
import sys

import hypothesis
import pytest

from tests import covering, long_cases

# TensorFlow's start-up messages would hide important lines.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# By default, Hypothesis draws the same examples in every run and on every
# machine. If TF_LAYOUTMAP_EXPLORE=1 is set, it draws new examples, and more of
# them. Examples have no deadline, because the first call of an op includes the
# time for tracing.
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
    """Returns the slowest test files, the slowest first."""
    lines = (ROOT / "tests" / "long_files.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks slow cases as `slow` and moves slow files to the front.

    The order matters when files run in parallel.
    """
    covering.mark_exhaustive(items)
    slow = long_cases.read()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    if hasattr(config, "workerinput"):  # Set in workers of pytest-xdist.
        files = {
            ROOT / file: -number
            for number, file in enumerate(reversed(long_files()), 1)
        }
        items.sort(key=lambda item: files.get(item.path, 0))


def pytest_collection_finish():
    """Excludes all imported objects from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_objects_of_other_files():
    """Excludes the objects of earlier files from garbage collections.

    `keras.utils.clear_session` and many tests collect garbage. The time of a
    collection depends on the number of objects that are not frozen.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def datasets_without_autotuning():
    """Disables autotuning in tf.data, because its iterators can end slowly.

    When an iterator with autotuning is deleted, it waits for its autotuning
    thread. In TensorFlow 2.21, the thread can be woken before its cancellation
    is visible to it, and then sleeps again. In one of twenty cases, the
    iterator therefore waits for as long as it was used, at most a minute.
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
    """Clears a default mesh that a failed test left set.

    An error in the scope of `dtensor.default_mesh` (TensorFlow 2.21) leaves the
    mesh set, also if `dtensor.relayout` entered the scope. The next test would
    then run on this mesh.
    """
    yield
    api = sys.modules.get("tensorflow.dtensor.python.api")
    mesh = api and api.get_default_mesh()
    if mesh is not None:
        api._dtensor_device()._current_default_mesh = None
        with api.default_mesh(mesh):  # The exit clears the default mesh.
            pass
