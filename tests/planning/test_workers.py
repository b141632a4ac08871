"""Runs plans for several processes in real processes."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes
from tests.planning import workers_program as program

# Starting the processes takes most of the time.
DEADLINE_SECONDS = 300


def values_of(embedding):
    found = {
        one.name: rows.numpy()
        for one, rows in embedding.embedding_tables.items()
    }
    for one, slots in embedding.slot_variables.items():
        for name, slot in slots.items():
            found[f"{one.name}/{name}"] = slot.numpy()
    return found


def one_process():
    embedding = tlm.TPUEmbedding(program.features(), program.optimizer())
    embedding.build()
    return embedding


def train_in_one_process(over_processes):
    """Trains the batches of all processes together.

    Returns:
      The tables and slot variables, and the activations of the last step.
    """
    embedding = one_process()
    for step in range(program.NUM_STEPS):
        ids, gradients = tf.nest.map_structure(
            lambda *parts: tf.concat(parts, 0),
            *[
                program.batch(over_processes, step, worker)
                for worker in range(program.NUM_WORKERS)
            ],
        )
        embedding.enqueue(ids)
        activations = embedding.dequeue()
        embedding.apply_gradients(gradients)
    return values_of(embedding), activations


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("over_processes", program.CASES)
def test_a_planned_group_has_the_planned_bytes_and_trains_like_one_process(
    over_processes, tmp_path
):
    processes.run_in_folder(
        tmp_path,
        program,
        over_processes,
        seconds=DEADLINE_SECONDS,
        count=program.NUM_WORKERS,
    )
    found = [
        json.loads((tmp_path / f"{worker}.json").read_text())
        for worker in range(program.NUM_WORKERS)
    ]
    assert [one["over_processes"] for one in found] == [over_processes] * 2
    for part in ("weights", "slot variables"):
        planned = [one["planned"][part] for one in found]
        resident = [one["resident"][part] for one in found]
        # The planned bytes are the bytes of the largest shard.
        assert resident == pytest.approx(planned, rel=0.01)
        assert max(resident) == max(planned)

    expected, activations = train_in_one_process(over_processes)
    embedding = one_process()
    tf.train.Checkpoint(embedding=embedding).read(
        str(tmp_path / "end")
    ).assert_consumed()
    trained = values_of(embedding)
    assert trained.keys() == expected.keys()
    # The processes sum up the gradients of equal ids in a different order.
    close = {"rtol": 2e-6, "atol": 2e-6}
    for name, value in expected.items():
        np.testing.assert_allclose(trained[name], value, **close, err_msg=name)
    for name, value in activations.items():
        by_worker = [
            np.load(tmp_path / f"{worker}.npz")[name]
            for worker in range(program.NUM_WORKERS)
        ]
        np.testing.assert_allclose(
            np.concatenate(by_worker), value.numpy(), **close, err_msg=name
        )
