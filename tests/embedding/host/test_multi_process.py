"""Trains a TPUEmbedding in two processes on this machine."""

import numpy as np
import pytest

from tests import processes, strategies
from tests.embedding.host import multi_process_faults, multi_process_program

NUM_STEPS = 6
# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 180
# Time limit for a process to end after its peer died.
DEATH_SECONDS = 60


@pytest.fixture
def start(tmp_path):
    """Yields a function that starts workers, and kills them afterwards."""
    workers = []

    def start(outputs, *arguments, program=multi_process_program):
        workers.extend(
            processes.start_workers(
                program,
                [[str(output), *arguments] for output in outputs],
                tmp_path,
            )
        )
        return workers

    yield start
    for one in workers:
        one.kill()


def train_in_one_process(num_steps, random):
    """Trains the same steps on two replicas of this process."""
    two = strategies.mirrored(multi_process_program.NUM_WORKERS)
    with two.scope():
        embedding = multi_process_program.embedding()
    embedding.build()
    [rows] = [
        rows
        for one, rows in embedding.embedding_tables.items()
        if one.name == "random"
    ]
    rows.assign(random)
    return multi_process_program.train_replicas(embedding, two, num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in order", "by token"])
def test_two_processes_train_bitwise_like_one(how, start, tmp_path):
    outputs = [tmp_path / f"{index}.npz" for index in range(2)]
    for one in start(outputs, str(NUM_STEPS), how):
        one.check(DEADLINE_SECONDS)
    found = [dict(np.load(output)) for output in outputs]
    expected, activations = train_in_one_process(NUM_STEPS, found[0]["start"])
    # The initial rows of a table without a seed are copied from the first
    # process.
    assert len(np.unique(found[0]["start"])) > 1
    for replica, values in enumerate(found):
        np.testing.assert_array_equal(values["start"], found[0]["start"])
        for name, value in expected.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)
        for name, value in activations[replica].items():
            np.testing.assert_array_equal(
                values[f"activation/{name}"], value, err_msg=name
            )


@pytest.mark.slow
def test_a_process_whose_peer_died_ends_with_an_error(start, tmp_path):
    survivor, dead = start(
        [tmp_path / "0.npz", tmp_path / "1.npz"], "5", "in order", "3"
    )
    dead.wait(DEADLINE_SECONDS)
    assert survivor.wait(DEATH_SECONDS) not in (0, "too late")
    assert "Error" in survivor.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, words",
    [
        (
            "bad_id",
            "Process 1: feature dense, sample 1: id 7 is outside table "
            "words with 5 rows",
        ),
        pytest.param(
            "bad_ragged_id",
            "Process 1: feature ragged, sample 2: id -1 is outside "
            "table words with 5 rows",
            marks=pytest.mark.exhaustive,
        ),
        (
            "restore_in_one",
            "Process 0 has restored 0 times, process 1 1 times.",
        ),
        ("restore_in_both", "trained"),
        (
            "other_rate",
            "It returned 0.25 in process 0 and 0.5 in process 1 for table "
            "words",
        ),
    ],
)
def test_an_error_names_the_process(start, tmp_path, case, words):
    outputs = [tmp_path / f"{index}.txt" for index in range(2)]
    for one in start(outputs, case, program=multi_process_faults):
        one.check(DEADLINE_SECONDS)
    for output in outputs:
        assert words in output.read_text()
