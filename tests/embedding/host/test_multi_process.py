"""TPUEmbedding in two processes on this machine."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.embedding.host import multi_process_faults, multi_process_program

NUM_STEPS = 6
# Starting takes most of it.
DEADLINE_SECONDS = 180
# Until a process whose peer is gone has ended.
DEATH_SECONDS = 60


def start(outputs, *arguments, program=multi_process_program.__file__):
    sockets = [socket.socket() for _ in outputs]
    for one in sockets:
        one.bind(("localhost", 0))
    addresses = [f"localhost:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    root = pathlib.Path(__file__).parents[3]
    return [subprocess.Popen(
        [sys.executable, program, str(output), *arguments],
        env={**os.environ, "PYTHONPATH": str(root), "TF_CONFIG": json.dumps({
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index}})},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for index, output in enumerate(outputs)]


def stop(processes):
    for one in processes:
        one.kill()
        one.wait()


def train_in_one_process(num_steps, random):
    """The same on two replicas of this process."""
    two = strategies.mirrored(multi_process_program.NUM_WORKERS)
    with two.scope():
        embedding = multi_process_program.embedding()
    embedding.build()
    [rows] = [rows for one, rows in embedding.embedding_tables.items()
              if one.name == "random"]
    rows.assign(random)
    step = multi_process_program.train_step(embedding, two)
    for number in range(num_steps):
        by_replica = [multi_process_program.batch(number, replica)
                      for replica in range(multi_process_program.NUM_WORKERS)]
        arguments = [tf.nest.map_structure(
            lambda *parts: two.experimental_distribute_values_from_function(
                lambda context: parts[context.replica_id_in_sync_group]),
            *[one[part] for one in by_replica]) for part in range(3)]
        activations = step(*arguments)
    return multi_process_program.tables(embedding), [
        {name: two.experimental_local_results(one)[replica].numpy()
         for name, one in activations.items()}
        for replica in range(multi_process_program.NUM_WORKERS)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in order", "by token"])
def test_two_processes_train_as_one_to_the_bit(how, tmp_path):
    outputs = [tmp_path / f"{index}.npz" for index in range(2)]
    processes = start(outputs, str(NUM_STEPS), how)
    try:
        for one in processes:
            _, errors = one.communicate(timeout=DEADLINE_SECONDS)
            assert one.returncode == 0, errors[-3000:]
    finally:
        stop(processes)
    found = [dict(np.load(output)) for output in outputs]
    expected, activations = train_in_one_process(NUM_STEPS, found[0]["start"])
    # Rows without a seed are those of the first process.
    assert len(np.unique(found[0]["start"])) > 1
    for replica, values in enumerate(found):
        np.testing.assert_array_equal(values["start"], found[0]["start"])
        for name, value in expected.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)
        for name, value in activations[replica].items():
            np.testing.assert_array_equal(
                values[f"activation/{name}"], value, err_msg=name)


@pytest.mark.slow
def test_a_process_whose_peer_died_ends_with_an_error(tmp_path):
    processes = start([tmp_path / "0.npz", tmp_path / "1.npz"], "5",
                      "in order", "3")
    try:
        survivor, dead = processes
        dead.communicate(timeout=DEADLINE_SECONDS)
        _, errors = survivor.communicate(timeout=DEATH_SECONDS)
        # Not killed by us: it did not wait for ever.
        assert survivor.returncode != 0
        assert "Error" in errors
    finally:
        stop(processes)


@pytest.mark.slow
@pytest.mark.parametrize("case, words", [
    ("bad_id", "Process 1: feature dense, sample 1: id 7 is outside table "
     "words with 5 rows"),
    ("bad_ragged_id", "Process 1: feature ragged, sample 2: id -1 is outside "
     "table words with 5 rows"),
    ("restore_in_one", "Process 0 has restored 0 times, process 1 1 times."),
    ("restore_in_both", "trained")])
def test_an_error_names_the_process(tmp_path, case, words):
    outputs = [tmp_path / f"{index}.txt" for index in range(2)]
    processes = start(outputs, case, program=multi_process_faults.__file__)
    try:
        for one in processes:
            _, errors = one.communicate(timeout=DEADLINE_SECONDS)
            assert one.returncode == 0, errors[-3000:]
    finally:
        stop(processes)
    for output in outputs:
        assert words in output.read_text()
