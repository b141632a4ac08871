"""Trains a TPUEmbedding in two processes on this machine."""

import numpy as np
import pytest
import tensorflow as tf

from tests import covering, processes
from tests.embedding.host import multi_process_faults, multi_process_program
from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.host import multi_process

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


@pytest.mark.slow
@pytest.mark.exhaustive
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
    covering.first(
        (
            "bad_id",
            "Process 1: feature dense, sample 1: id 7 is outside table "
            "words with 5 rows",
        ),
        (
            "bad_ragged_id",
            "Process 1: feature ragged, sample 2: id -1 is outside "
            "table words with 5 rows",
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
    ),
)
def test_an_error_names_the_process(start, tmp_path, case, words):
    outputs = [tmp_path / f"{index}.txt" for index in range(2)]
    for one in start(outputs, case, program=multi_process_faults):
        one.check(DEADLINE_SECONDS)
    for output in outputs:
        assert words in output.read_text()


@pytest.mark.parametrize("num_ids", [0, 3])
def test_replicas_without_ids_never_gather_empty_values(num_ids):
    """TensorFlow's op ends all processes if all values are empty."""

    def all_gather(values):
        tf.debugging.assert_positive(tf.size(values))
        return tf.concat([values, values], 0)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None]),
            tf.TensorSpec([None, 2]),
        ]
    )
    def gather(ids, weights, gradients):
        splits = tf.zeros([0], tf.int64)
        feature = inputs.FeatureIds(ids, splits, tf.size(ids), weights)
        found, _, _ = multi_process.gather_inputs(
            all_gather, [feature, feature], True, tf.constant(0, tf.int64), 0, 2
        )
        return [
            [(one.ids, one.weights) for one in features]
            for _, features in found
        ], multi_process.gather_gradients(all_gather, [gradients], [], 2)

    ids = tf.range(5, 5 + num_ids, dtype=tf.int64)
    weights, gradients = tf.ones([num_ids]), tf.ones([num_ids, 2])
    found, of_gradients = gather(ids, weights, gradients)
    for features in found:
        for one, other in features:
            np.testing.assert_array_equal(one, ids)
            np.testing.assert_array_equal(other, weights)
    for (one,), _ in of_gradients:
        np.testing.assert_array_equal(one, gradients)
