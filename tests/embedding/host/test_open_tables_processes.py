"""Trains tables with open vocabularies in two processes on this machine."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests import covering, processes, strategies
from tests.embedding.host import open_tables_program as program

NUM_STEPS = 8
# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 180


@pytest.fixture
def run(tmp_path):
    """Runs both workers until they exit and returns their output paths."""

    def run(how):
        outputs = [tmp_path / str(index) for index in range(2)]
        processes.run_workers(
            program,
            [[str(output), str(NUM_STEPS), how] for output in outputs],
            tmp_path,
            DEADLINE_SECONDS,
        )
        return outputs

    return run


def train_here(num_replicas, how="in order"):
    """Trains in one process and returns all variables and results."""
    strategy = strategies.mirrored(num_replicas)
    on_evict = program.OnEvict()
    with strategy.scope():
        embedding = program.embedding(on_evict)
    embedding.build()
    step = program.train_step(embedding, strategy, how)
    for number in range(NUM_STEPS):
        batches = [
            program.batch(number, replica)
            for replica in range(program.NUM_WORKERS)
        ]
        if num_replicas == 1:
            parts = [
                tf.nest.map_structure(
                    lambda *parts: tf.concat(parts, 0),
                    *[one[part] for one in batches],
                )
                for part in range(2)
            ]
        else:
            parts = [
                tf.nest.map_structure(
                    lambda *parts: (
                        strategy.experimental_distribute_values_from_function(
                            lambda context: parts[
                                context.replica_id_in_sync_group
                            ]
                        )
                    ),
                    *[one[part] for one in batches],
                )
                for part in range(2)
            ]
        activations = step(*parts)
    return (
        program.contents(embedding),
        [
            {
                name: strategy.experimental_local_results(one)[replica].numpy()
                for name, one in activations.items()
            }
            for replica in range(num_replicas)
        ],
        np.array(on_evict.keys),
    )


def check_same(found, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_packed_strings_on_replicas_equal_one_replica_bitwise(num_replicas):
    expected, _, _ = train_here(1)
    found, _, _ = train_here(num_replicas, "packed")
    check_same(found, expected)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["in order", "packed"])
def test_two_processes_equal_one_replica_bitwise(run, how):
    found = [dict(np.load(f"{output}.npz")) for output in run(how)]
    expected, _, evicted_keys = train_here(1)
    two_replicas, activations, _ = train_here(2)
    check_same(two_replicas, expected)
    assert len(evicted_keys) > 10
    for replica, values in enumerate(found):
        check_same(values, expected)
        check_same(
            values,
            {
                f"activation/{name}": value
                for name, value in activations[replica].items()
            },
        )
    first, second = found
    for name in ("counts", "same_keys"):
        np.testing.assert_array_equal(
            first[f"sampled/{name}"], second[f"sampled/{name}"]
        )
    assert first["sampled/counts"].any()
    assert set(first["sampled/same_keys"]) <= set(
        expected["items/vocabulary_keys"].ravel()
    )
    assert (first["sampled/other_keys"] != second["sampled/other_keys"]).any()
    # Only the first process reports evicted keys.
    np.testing.assert_array_equal(found[0]["evicted_keys"], evicted_keys)
    assert found[1]["evicted_keys"].tolist() == [0]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("how", ["failing evict", "failing resize"])
def test_an_error_of_on_evict_undoes_the_call_in_both_processes(run, how):
    """The program checks that the first call changes no variable."""
    first, second = (
        pathlib.Path(f"{output}.txt").read_text() for output in run(how)
    )
    assert first == "OSError: disk full"
    assert second.startswith(f"RuntimeError: `{how.split()[1]}` of table")
    assert "failed in process 0: OSError: disk full" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    covering.first(
        ("mixed", "Process 0 has true, process 1 false."),
        ("write one", "Process 1 has written other rows than process 0"),
        ("evict other", "The keys in `evict` of table 'items' must be equal"),
        ("resize other", "Received: 24 in process 0, 32 in process 1."),
        ("resize in flight", "cannot be resized while steps are in flight"),
        ("evict in a function", "must be called outside tf.function under"),
        (
            "keep strings",
            "`keep_strings` of tlm.vocabulary.OpenVocabulary must be False",
        ),
    ),
)
def test_calls_of_a_single_process_raise(run, how, words):
    for output in run(how):
        assert words in pathlib.Path(f"{output}.txt").read_text()
