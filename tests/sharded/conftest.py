"""Fixtures of the tests in this folder."""

import gc

import numpy as np
import pytest

from tests import strategies  # noqa: F401 (splits the CPU before the first op)
from tf_layoutmap.sharded.routing import parts


@pytest.fixture
def values():
    """Returns a [10, 2] float32 array of distinct integers."""
    return np.arange(20, dtype=np.float32).reshape(10, 2)


@pytest.fixture(
    params=[[10], [4, 3, 3], [1, 2, 0, 7]], ids=["one", "even", "uneven"]
)
def sizes(request):
    return request.param


@pytest.fixture(scope="module", params=["our op", "stock ops"])
def each_route(request):
    """Runs a test with this package's op, and with only TensorFlow's ops."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "stock ops":
            patch.setattr(parts, "is_local_cpu", lambda device: False)
        yield


@pytest.fixture
def new_objects():
    """Returns a function that lists live objects created in this test.

    Older objects are frozen, because a process that ran many tests holds
    millions of objects, and iterating over all objects takes seconds.
    """
    gc.collect()
    gc.freeze()

    def alive():
        gc.collect()
        return gc.get_objects()

    yield alive
    gc.unfreeze()
