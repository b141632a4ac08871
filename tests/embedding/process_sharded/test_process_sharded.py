"""TPUEmbedding with tables sharded over processes on this machine."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import covering, processes, strategies
from tests.embedding import stock_class
from tests.embedding.checkpoints import stacks
from tests.embedding.host import multi_process_program as plan
from tests.embedding.process_sharded import faults, program, stock_program
from tf_layoutmap.embedding.configs import config, optimizer_specs
from tf_layoutmap.embedding.process_sharded import step_exchange

NUM_STEPS = 5
# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 180
# Time limit for a process to end after its peer died.
DEATH_SECONDS = 60


@pytest.fixture
def start(tmp_path):
    """Yields a function that starts processes, and kills them afterwards."""
    workers = []

    def start(count, *arguments, of=program):
        started = processes.start_workers(
            of,
            [[str(tmp_path), *arguments]] * count,
            tmp_path,
        )
        workers.extend(started)
        return started

    yield start
    for one in workers:
        one.kill()


def checkpoint_of(embedding):
    embedding.build()
    return tf.train.Checkpoint(embedding=embedding)


def tables_in(path, *dtype):
    """Restores a checkpoint in one process and returns its tables."""
    embedding = plan.embedding(*dtype)
    checkpoint_of(embedding).read(str(path)).assert_consumed()
    return plan.tables(embedding)


def train_in_one_process(path, num_steps, num_replicas, *dtype):
    """Trains the same steps on several replicas in this process."""
    strategy = strategies.mirrored(num_replicas)
    with strategy.scope():
        embedding = plan.embedding(*dtype)
    checkpoint_of(embedding).read(str(path)).assert_consumed()
    return plan.train_replicas(embedding, strategy, num_steps)


def check_same(folder, num_processes, *dtype):
    """Checks that results are bitwise equal to the results of one process."""
    expected, activations = train_in_one_process(
        folder / "start", NUM_STEPS, num_processes, *dtype
    )
    found = tables_in(folder / "end", *dtype)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    for worker, by_name in enumerate(activations):
        of_worker = np.load(folder / f"{worker}.npz")
        for name, value in by_name.items():
            np.testing.assert_array_equal(of_worker[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_stacked", [False, True])
def test_three_processes_continue_a_checkpoint_of_one(
    is_stacked, start, tmp_path
):
    # SparseCores do not have tables of 16 bits.
    dtype = "float32" if is_stacked else "bfloat16"
    embedding = plan.embedding(dtype)
    checkpoint = checkpoint_of(embedding)
    path = str(tmp_path / ("unstacked" if is_stacked else "restart"))
    checkpoint.write(path)
    if is_stacked:
        shapes = {
            table.name: {table.name: tuple(rows.shape)}
            for table, rows in embedding.embedding_tables.items()
        }
        tlm.planning.convert_checkpoint(
            path, tmp_path / "restart", stacks.layouts_of(shapes, 4)
        )
    before = plan.tables(embedding)
    for one in start(3, str(NUM_STEPS), dtype):
        one.check(DEADLINE_SECONDS)
    after = tables_in(tmp_path / "start", dtype)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    check_same(tmp_path, 3, dtype)
    # Each process has a third of the rows of a table and its slot variables.
    rows = [
        json.loads((tmp_path / f"rows_{worker}.json").read_text())
        for worker in range(3)
    ]
    assert [one["words/accumulators"] for one in rows] == [
        [0, 7, [7, 5]],
        [7, 14, [7, 5]],
        [14, 20, [6, 5]],
    ]
    assert [one["users/"] for one in rows] == [
        [0, 3, [3, 3]],
        [3, 6, [3, 3]],
        [6, 9, [3, 3]],
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tensorflow_s_class_reads_a_group_s_checkpoint(start, tmp_path):
    for one in start(2, of=stock_program):
        one.check(DEADLINE_SECONDS)
    found = stock_class.tables_in(tmp_path / "end")
    strategy = strategies.mirrored(2)
    with strategy.scope():
        embedding = tlm.TPUEmbedding(stock_class.features(), None)
    stock_class.train(embedding, stock_program.NUM_STEPS, strategy)
    expected = plan.tables(embedding)
    assert len(found) == len(expected) == 5
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert len(np.unique(value)) > 1


@pytest.mark.slow
def test_a_process_ends_after_its_peer_and_a_restart_resumes(start, tmp_path):
    survivor, dead = start(2, "5", "bfloat16", "3")
    dead.wait(DEADLINE_SECONDS)
    assert survivor.wait(DEATH_SECONDS) not in (0, "too late")
    assert "Error" in survivor.log.read_text()
    for path in tmp_path.glob("start.*"):
        path.rename(path.with_name(path.name.replace("start", "restart")))
    for one in start(2, str(NUM_STEPS)):
        one.check(DEADLINE_SECONDS)
    check_same(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, words",
    covering.first(
        (
            "bad_id",
            "Process 1: Feature dense, sample 1: id 7 is outside table "
            "words with 5 rows",
        ),
        ("bad_splits", "Process 1: Feature ragged"),
        (
            "restore_in_one",
            "Process 0 has restored 0 times, process 1 1 times.",
        ),
        (
            "lookup_outside_of_a_step",
            "must be used in a tf.function: the processes exchange ids",
        ),
        ("equal_rates", "trained"),
        (
            "other_rate",
            "It returned 0.25 in process 0 and 0.5 in process 1 for table "
            "words",
        ),
        ("calls_in_two_functions", "must be made in one tf.function"),
    ),
)
def test_an_error_is_raised_in_all_processes(start, tmp_path, case, words):
    for one in start(2, case, of=faults):
        one.check(DEADLINE_SECONDS)
    for worker in range(2):
        assert words in (tmp_path / f"{worker}.txt").read_text()


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"over_processes": "sharded"},
            'must be "replicated" unless under MultiWorkerMirroredStrategy',
        ),
        ({"over_processes": "both"}, "must be one of"),
        (
            {"gradient_aggregation": "local"},
            'must be "exact" unless over_processes',
        ),
        ({"gradient_aggregation": "any"}, "must be one of"),
    ],
)
def test_options_that_require_processes_raise(options, words):
    with pytest.raises(ValueError, match=words):
        plan.embedding(**options)


def test_folded_gradients_require_gradient_accumulation():
    spec = config.EmbeddingSpec(
        (
            config.TableSpec(
                "words",
                4,
                2,
                "sum",
                tf.zeros,
                optimizer_specs.read_optimizer(
                    tf.tpu.experimental.embedding.SGD(
                        0.1, use_gradient_accumulation=False
                    ),
                    table="words",
                ),
            ),
        ),
        (),
    )
    with pytest.raises(ValueError, match="aggregation.*\"exact\".*'words'"):
        step_exchange.Folded(spec, 2, 0, [2])
