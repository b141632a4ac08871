"""What the tests of this folder share."""

import numpy as np
import pytest

from tf_layoutmap.sharded import routing


@pytest.fixture
def values():
    """[10, 2] float32, every element another whole number."""
    return np.arange(20, dtype=np.float32).reshape(10, 2)


@pytest.fixture(params=[[10], [4, 3, 3], [1, 2, 0, 7]],
                ids=["one", "even", "uneven"])
def sizes(request):
    return request.param


@pytest.fixture(scope="module", params=["our op", "stock ops"])
def each_route(request):
    """Runs a test with ids routed by our op, and by TensorFlow's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_takes_our_ops",
                      lambda shards: request.param == "our op")
        yield
