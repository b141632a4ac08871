"""Two processes over gRPC train as one does, and one reads what they save."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from tests.layout import twins, two_clients

pytestmark = pytest.mark.slow

_SECONDS = 80


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def start(folder):
    """Runs both clients to their end; returns what they printed."""
    jobs = ",".join(f"localhost:{port}" for port in free_ports(2))
    # To files: nobody reads a pipe while the other process is waited for.
    logs = [folder / f"log_{client}" for client in range(2)]
    processes = []
    try:
        for client, log in enumerate(logs):
            with log.open("w") as file:
                processes.append(subprocess.Popen(
                    [sys.executable, "-m", "tests.layout.two_clients",
                     str(folder)],
                    stdout=file, stderr=subprocess.STDOUT,
                    cwd=Path(__file__).parents[2],
                    env={**os.environ,
                         "KERAS_DISTRIBUTION_PROCESS_ID": str(client),
                         "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
                         "KERAS_DISTRIBUTION_JOB_ADDRESSES": jobs}))
        for process, log in zip(processes, logs, strict=True):
            try:
                code = process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                code = "too late"
            assert code == 0, f"{code}: {log.read_text()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(line.removeprefix("FOUND "))
            for log in logs for line in log.read_text().splitlines()
            if line.startswith("FOUND ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def found(folder):
    return start(folder)


@pytest.fixture(scope="module")
def alone():
    """The same model in this process, without a mesh."""
    model = twins.plain(two_clients.make)
    return model, two_clients.train(model)


def test_losses_and_predictions_are_those_of_one_process(found, alone):
    assert len(found) == 2
    assert found[0] == found[1]
    numbers = {name: found[0][name] for name in alone[1]}
    assert len(numbers["history"]["loss"]) == 3
    twins.assert_alike(alone[1], numbers)


def test_weights_are_sharded_over_both(found):
    assert [tuple(axes) for axes in found[0]["axes"]] == [
        ("batch", "model"), ("model",), (None,), (None,), (None,),
        ("model", None), (None,)]


@pytest.mark.parametrize("where", ["without a mesh", "on a mesh"])
def test_one_process_reads_the_checkpoint_of_two(found, alone, folder, where):
    model = (twins.plain(two_clients.make) if where == "without a mesh" else
             twins.on_mesh(two_clients.make, two_clients.AXES))
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5),
                  twins.loss())
    model.optimizer.build(model.trainable_variables)
    status = two_clients.checkpoint_of(model).read(
        str(folder / "checkpoint"))
    status.assert_existing_objects_matched()
    twins.assert_same_weights(alone[0], model)


def test_each_client_saves_the_whole_model(found, alone, folder):
    for client in range(2):
        model = keras.saving.load_model(folder / f"client_{client}.keras")
        twins.assert_same_weights(alone[0], model)
