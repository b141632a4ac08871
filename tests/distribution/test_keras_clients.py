"""keras.distribution over two processes matches one process."""

import keras
import pytest

from tests import processes
from tests.distribution import keras_client
from tests.layout import pairs

_SECONDS = 240


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_match_one_process(tmp_path):
    first, second = processes.run_clients(
        "tests.distribution.keras_client", tmp_path, seconds=_SECONDS
    )
    assert first.pop("process") == [2, 0] and second.pop("process") == [2, 1]
    assert first == second
    assert first["devices"] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert first["specs"] == ["unsharded", "model"]
    keras.utils.set_random_seed(3)
    expected = keras_client.train(keras_client.make())
    pairs.assert_alike(expected, {name: first[name] for name in expected})
