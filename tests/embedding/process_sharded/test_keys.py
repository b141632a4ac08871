"""Open vocabularies in tables that are sharded over processes."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import processes, strategies
from tests.embedding.host import open_tables_program as plan
from tests.embedding.process_sharded import keys_program as program
from tests.embedding.servers import local

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


def restored(strategy, path, on_evict=None, capacities=()):
    """Returns an embedding of this process after a restored checkpoint."""
    with strategy.scope():
        embedding = plan.embedding(on_evict)
    embedding.build()
    for table, capacity in zip(("items", "names"), capacities):
        embedding.vocabularies[table].resize(capacity)
    tf.train.Checkpoint(embedding=embedding).read(str(path)).assert_consumed()
    return embedding


def train_here(num_replicas, how, path):
    """Trains the same steps on several replicas in this process."""
    strategy = strategies.mirrored(num_replicas)
    on_evict = plan.OnEvict()
    embedding = restored(strategy, path, on_evict)
    step = plan.train_step(embedding, strategy, program.calls_of(how))

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
        embedding, strategy, step, NUM_STEPS, how, batches, on_evict
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


def check_same(folder, count, how):
    """Checks that all results are bitwise equal to one process."""
    expected, activations = train_here(count, how, folder / "start")
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
            capacities=program.CAPACITIES[5] if how == "resize" else (),
        )
    )
    for name, value in in_checkpoint.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    return expected


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "how", ["in order", "evict", "by token", "evict by token"]
)
def test_processes_equal_replicas_of_one_process_bitwise(run, count, how):
    expected = check_same(run(count, how), count, how)
    assert len(expected["on_evict"]) > 10
    assert (len(expected["evicted"]) > 10) == ("evict" in how)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_resized_vocabularies_equal_those_of_one_process_bitwise(run, count):
    expected = check_same(run(count, "resize"), count, "resize")
    for number, dropped in {3: True, 5: False}.items():
        for table in ("items", "names"):
            conversion = expected[f"conversion {number}/{table}"]
            assert (conversion[1] > 0) == dropped, (number, table)
            assert conversion[0] >= 16
    assert len(expected["on_evict"]) > 10


@pytest.mark.slow
@pytest.mark.exhaustive
def test_written_rows_equal_those_of_one_process_bitwise(run):
    check_same(run(2, "write"), 2, "write")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_is_restored_by_another_number_of_processes(
    run, tmp_path, count
):
    run(2, "in order")
    for path in tmp_path.glob("end.*"):
        path.rename(tmp_path / path.name.replace("end", "restart"))
    check_same(run(count, "in order"), count, "in order")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["in order", "by token"])
def test_folded_gradients_admit_the_same_keys(run, how):
    folder = run(2, how, "local")
    expected, _ = train_here(2, how, folder / "start")
    found = dict(np.load(folder / "0.npz"))
    for name, value in expected.items():
        if value.dtype.kind == "i":
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        elif name.startswith("items/"):
            np.testing.assert_allclose(found[name], value, atol=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["full", "full by token"])
def test_a_step_with_a_full_vocabulary_changes_no_process(run, how):
    """The program checks that the failed step changes no variable."""
    folder = run(2, how)
    for worker in range(2):
        found = (folder / f"{worker}.txt").read_text()
        assert "has no free row" in found
        assert "Increase `capacity`" in found


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
def test_an_error_of_on_evict_undoes_the_call_in_all_processes(run, how):
    """The program checks that `evict` and `resize` change no variable."""
    folder = run(2, how)
    first, second = (
        (folder / f"{worker}.txt").read_text() for worker in range(2)
    )
    for found in (first, second):
        assert "OSError: disk full" in found


@pytest.mark.slow
def test_processes_read_and_sample_keys_as_servers_with_these_shards(run):
    """Lookups, counts and samples also work in a training step."""
    folder = run(2, "sampled")
    with local.servers(2):
        embedding = plan.embedding()
    embedding.build()
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    checkpoint.read(str(folder / "end")).assert_consumed()
    for worker in range(2):
        expected = program.read_keys(embedding.vocabularies["items"], worker)
        assert tf.reduce_sum(expected["counts"]) > 10
        for case in ("eager", "in a replica"):
            found = np.load(folder / f"{case} {worker}.npz")
            for name, value in expected.items():
                np.testing.assert_array_equal(
                    found[name], value, err_msg=f"{case}: {name}"
                )


@pytest.mark.slow
def test_unsupported_calls_raise_in_all_processes(run):
    folder = run(2, "refused")
    for worker in range(2):
        found = json.loads((folder / f"{worker}.txt").read_text())
        for name, words in {
            "lookup in a function": "outside of tf.function, by all processes",
            "keys in a function": "must be called outside of tf.function",
            "evict other": "The keys in `evict` of table 'items' must be equal",
            "write other": "The arguments of `write` of table 'items' must be",
            "keep strings": "`keep_strings` of tlm.vocabulary.OpenVocabulary "
            "must be",
            "integers": "The keys of table 'names' must be strings",
        }.items():
            assert words in found[name], name
