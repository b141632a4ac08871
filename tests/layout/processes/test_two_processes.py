"""Checks that two processes over gRPC match one process.

Checks that one process can load the files that two processes save.
"""

import keras
import pytest

from tests import processes
from tests.layout import pairs
from tests.layout.processes import two_clients

pytestmark = pytest.mark.slow

_SECONDS = 240


def start(folder):
    """Runs both clients and returns the results that they print."""
    return processes.run_clients(
        "tests.layout.processes.two_clients",
        folder,
        str(folder),
        seconds=_SECONDS,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def found(folder):
    return start(folder)


@pytest.fixture(scope="module")
def one_process():
    """Trains the same model in this process, without a mesh."""
    model = pairs.plain(two_clients.make)
    return model, two_clients.train(model)


def test_losses_and_predictions_match_one_process(found, one_process):
    assert len(found) == 2
    assert found[0] == found[1]
    numbers = {name: found[0][name] for name in one_process[1]}
    assert len(numbers["history"]["loss"]) == 3
    pairs.assert_alike(one_process[1], numbers)


def test_weights_are_sharded_over_both_processes(found):
    assert [tuple(axes) for axes in found[0]["axes"]] == [
        ("batch", "model"),
        ("model",),
        (None,),
        (None,),
        (None,),
        ("model", None),
        (None,),
    ]


@pytest.mark.parametrize("where", ["without a mesh", "on a mesh"])
def test_one_process_loads_the_checkpoint_of_two(
    found, one_process, folder, where
):
    model = (
        pairs.plain(two_clients.make)
        if where == "without a mesh"
        else pairs.on_mesh(two_clients.make, two_clients.AXES)
    )
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.5), pairs.loss()
    )
    model.optimizer.build(model.trainable_variables)
    status = two_clients.checkpoint_of(model).read(str(folder / "checkpoint"))
    status.assert_existing_objects_matched()
    pairs.assert_same_weights(one_process[0], model)


def test_each_client_saves_the_full_model(found, one_process, folder):
    for client in range(2):
        model = keras.saving.load_model(folder / f"client_{client}.keras")
        pairs.assert_same_weights(one_process[0], model)
