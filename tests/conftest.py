"""Fixtures and hooks of all tests, without an import of TensorFlow."""

import collections
import gc
import os
import pathlib
import resource
import sys

import hypothesis
import pytest

from tests import covering, long_cases
from tests.accelerators import fake_gpu

# TensorFlow's messages at startup would hide important output.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# `make test-gpu` adds devices of type GPU. They are added before other files
# list the devices.
if os.environ.get("TF_LAYOUTMAP_FAKE_GPUS"):
    fake_gpu.load_for_tests(
        os.environ["TF_LAYOUTMAP_FAKE_GPU_LIBRARY"],
        int(os.environ["TF_LAYOUTMAP_FAKE_GPUS"]),
    )

# By default, Hypothesis draws the same examples in every run and on every
# machine. With TF_LAYOUTMAP_EXPLORE=1, each run draws different examples, and
# more examples. Examples have no deadline, because the first call of an op
# includes the time for tracing.
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
STAT = pathlib.Path("/proc/stat")
SECONDS_AT_START = pytest.StashKey[float]()
SECONDS_SPENT = pytest.StashKey[float]()
IS_TOO_SLOW = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks slow cases as `slow` and moves slow files to the front.

    When files run in parallel, starting slow files first reduces the total
    time.
    """
    slow = set(long_cases.read())
    covering.mark_exhaustive(items, slow)
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    if os.environ.get("TF_LAYOUTMAP_FAKE_GPUS"):
        fake_gpu.skip_items(items)
    # pytest-xdist sets this variable in its workers.
    if hasattr(config, "workerinput"):
        number = os.environ.get("TF_LAYOUTMAP_FIRST_FILE")
        if number is None:
            files = {
                ROOT / file: -number
                for number, file in enumerate(
                    reversed(long_cases.read(long_cases.FILES)), 1
                )
            }
        else:
            # A run that ends before all files have run can start with any file.
            found = sorted({item.path for item in items})
            files = {
                path: (index - int(number)) % len(found)
                for index, path in enumerate(found)
            }
        items.sort(key=lambda item: files.get(item.path, 0))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    session.config.stash[SECONDS_AT_START] = processor_seconds()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fails a parallel run that exceeds its processor time."""
    config = session.config
    spent = processor_seconds() - config.stash[SECONDS_AT_START]
    config.stash[SECONDS_SPENT] = spent
    limit = os.environ.get("TF_LAYOUTMAP_PROCESSOR_SECONDS")
    is_controller = bool(config.getoption("numprocesses", None))
    if limit and is_controller and spent > float(limit):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        config.stash[IS_TOO_SLOW] = True


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Prints the slowest files and the processor time of a parallel run."""
    if not config.getoption("numprocesses", None):
        return
    cases = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            cases[getattr(report, "nodeid", "")] += getattr(
                report, "duration", 0
            )
    terminalreporter.section("slowest files")
    for name, seconds in list(long_cases.of_files(cases).items())[:10]:
        terminalreporter.line(f"{seconds:8.1f} s  {name}")
    spent = config.stash[SECONDS_SPENT]
    terminalreporter.line(f"{spent:8.0f} s of processor time")
    if config.stash.get(IS_TOO_SLOW, False):
        limit = os.environ["TF_LAYOUTMAP_PROCESSOR_SECONDS"]
        terminalreporter.line(
            f"ERROR: This exceeds the limit of {limit} s. Make tests faster, "
            "or mark cases as `exhaustive`.",
            red=True,
        )


def processor_seconds() -> float:
    """Returns the processor time of all processes on this machine, in seconds.

    Processes that other processes started, such as servers of a test cluster,
    are included. Other programs on the machine are included, too.
    """
    if not STAT.exists():
        return sum(
            sum(resource.getrusage(who)[:2])
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
    user, nice, system = STAT.read_text().split(maxsplit=4)[1:4]
    ticks = int(user) + int(nice) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


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
    """Disables autotuning in tf.data, because deleting its iterators is slow.

    When an iterator that autotunes is deleted, it waits for its autotuning
    thread. In TensorFlow 2.21, the thread can wake up before it sees its
    cancellation, and then sleeps again. In one of twenty cases, the deletion
    therefore takes as long as the iterator was used before, up to a minute.
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
def seed_of_this_test_only():
    """Restores the seed of `tf.random.set_seed` after each test.

    Otherwise, a test would depend on the tests that ran before it in the same
    process.
    """
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is None:
        yield
        return
    seed = context.global_seed()
    yield
    if context.global_seed() != seed:
        context.set_global_seed(seed)


@pytest.fixture(autouse=True)
def no_mesh_left_behind():
    """Clears a default mesh that a failed test left set.

    In TensorFlow 2.21, an error inside `dtensor.default_mesh` leaves the
    default mesh set. `dtensor.relayout` also enters this context manager. The
    next test would then run on this mesh.
    """
    yield
    api = sys.modules.get("tensorflow.dtensor.python.api")
    mesh = api and api.get_default_mesh()
    if mesh is not None:
        api._dtensor_device()._current_default_mesh = None
        # Leaving the context clears the default mesh.
        with api.default_mesh(mesh):
            pass
