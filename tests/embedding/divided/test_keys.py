"""Open vocabularies in tables that are sharded over processes."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import processes, strategies
from tests.embedding.divided import keys_program as program
from tests.embedding.host import open_tables_program as plan

NUM_STEPS = 8
# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 180


@pytest.fixture
def run(tmp_path):
    """Runs the program in several processes, and returns their folder."""

    def run(count, *arguments):
        return processes.run_in_folder(
            tmp_path,
            program,
            str(NUM_STEPS),
            *arguments,
            seconds=DEADLINE_SECONDS,
            count=count,
        )

    return run


def restored(strategy, path, on_evict=None):
    """Returns an embedding of this process after a restored checkpoint."""
    with strategy.scope():
        embedding = plan.embedding(on_evict)
    embedding.build()
    tf.train.Checkpoint(embedding=embedding).read(str(path)).assert_consumed()
    return embedding


def train_here(num_replicas, path):
    """Trains the same steps on several replicas in this process."""
    strategy = strategies.mirrored(num_replicas)
    on_evict = plan.OnEvict()
    embedding = restored(strategy, path, on_evict)
    step = plan.train_step(embedding, strategy)

    def batches(number):
        of_replicas = [
            plan.batch(number, replica) for replica in range(num_replicas)
        ]
        if num_replicas == 1:
            return of_replicas[0]
        distribute = strategy.experimental_distribute_values_from_function
        return [
            tf.nest.map_structure(
                lambda *parts: distribute(
                    lambda context: parts[context.replica_id_in_sync_group]
                ),
                *[one[part] for one in of_replicas],
            )
            for part in range(2)
        ]

    activations, found = program.train(
        embedding, step, NUM_STEPS, batches, on_evict
    )
    return {**found, **program.contents(embedding)}, [
        {
            f"activation/{name}": strategy.experimental_local_results(one)[
                replica
            ].numpy()
            for name, one in activations.items()
        }
        for replica in range(num_replicas)
    ]


def check_same(folder, count):
    """Checks that all results are bitwise equal to one process."""
    expected, activations = train_here(count, folder / "start")
    assert len(expected["keys"]) > 20
    for worker in range(count):
        found = dict(np.load(folder / f"{worker}.npz"))
        if worker:  # Only the first process calls `on_evict`.
            assert found.pop("on_evict").tolist() == [0]
        for name, value in {**expected, **activations[worker]}.items():
            if name in found:
                np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert expected.keys() - found.keys() <= {"on_evict"}
    in_checkpoint = program.contents(
        restored(
            strategies.mirrored(1),
            folder / "end",
        )
    )
    for name, value in in_checkpoint.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_is_restored_by_another_number_of_processes(
    run, tmp_path, count
):
    run(2, "train")
    for path in tmp_path.glob("end.*"):
        path.rename(tmp_path / path.name.replace("end", "restart"))
    check_same(run(count, "train"), count)


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Errors of the calls that fail in two processes, by process.

    The program checks that the failed calls change no variable, and that a step
    after them succeeds.
    """
    folder = tmp_path_factory.mktemp("errors")
    processes.run_in_folder(
        folder,
        program,
        str(NUM_STEPS),
        *program.FAILING,
        seconds=3 * DEADLINE_SECONDS,
    )
    return [
        {
            name: (folder / f"{name} {worker}.txt").read_text()
            for name in program.FAILING
        }
        for worker in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "full by token"])
def test_a_step_with_a_full_vocabulary_raises_in_all_processes(errors, how):
    for found in errors:
        assert "has no free row" in found[how]
        assert "Increase `capacity`" in found[how]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "failing evict",
        "failing resize",
        "failing step",
        "failing step by token",
    ],
)
def test_an_error_of_on_evict_is_raised_in_all_processes(errors, how):
    for found in errors:
        assert "OSError: disk full" in found[how]


@pytest.mark.slow
def test_an_update_that_only_one_process_has_applied_raises(errors):
    for found in errors:
        assert "Process 0 has applied " in found["flush in one"]
        assert "Call `flush` in all processes" in found["flush in one"]


@pytest.mark.slow
def test_unsupported_calls_raise_in_all_processes(errors):
    for one in errors:
        found = json.loads(one["refused"])
        for name, words in {
            "lookup in a function": "outside of tf.function, by all processes",
            "keys in a function": "must be called outside of tf.function",
            "sample": "Sampling of keys is not supported with over_processes",
            "evict other": "The keys in `evict` of table 'items' must be equal",
            "write other": "The arguments of `write` of table 'items' must be",
            "keep strings": "`keep_strings` of tlm.OpenVocabulary must be",
            "integers": "The keys of table 'names' must be strings",
        }.items():
            assert words in found[name], name
