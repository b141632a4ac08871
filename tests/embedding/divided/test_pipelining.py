"""Pipelined updates of tables that are sharded over processes."""

import numpy as np
import pytest
import tensorflow as tf

from tests import covering, processes, strategies
from tests.embedding.divided import pipelining_program as program

# Starting the processes and tracing take most of the time of a test.
DEADLINE_SECONDS = 240


@pytest.fixture
def run(tmp_path):
    """Runs the program in several processes, and returns their folder."""

    def run(count, case, order="exact"):
        return processes.run_in_folder(
            tmp_path,
            program,
            case,
            order,
            seconds=DEADLINE_SECONDS,
            count=count,
        )

    return run


def train_here(folder, count, case, **options):
    """Makes the same calls with several replicas in this process."""
    strategy = strategies.mirrored(count)
    with strategy.scope():
        one = program.embedding(case, **options)
    one.build()
    tf.train.Checkpoint(embedding=one).read(
        str(folder / "start")
    ).assert_consumed()

    def batches(number):
        parts = [
            program.batch(case, number, replica) for replica in range(count)
        ]
        distribute = strategy.experimental_distribute_values_from_function
        return tf.nest.map_structure(
            lambda *values: distribute(
                lambda context: values[context.replica_id_in_sync_group]
            ),
            *parts,
        )

    return program.train(case, one, strategy, batches)


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "count"),
    covering.but(
        [("closed", 2), ("closed", 3), ("keys", 2)],
        ("closed", 2),
        ("closed", 3),
    ),
)
def test_lookups_and_tables_equal_those_of_one_process_bitwise(
    run, case, count
):
    folder = run(count, case)
    activations, found = train_here(folder, count, case)
    for worker in range(count):
        check_same(np.load(folder / f"found_{worker}.npz"), found)
        check_same(
            np.load(folder / f"activations_{worker}.npz"), activations[worker]
        )
        # The error of a step after only process 0 has applied the update.
        assert "Process 0 has applied " in (
            error := (folder / f"{worker}.txt").read_text()
        ), error
        assert "Call `flush` in all processes" in error
    if case == "keys":
        pending = program.SCHEDULES[case].index("evict pending")
        assert found[str(pending)]
        return
    # Without pipelining, the lookups return other rows.
    unpipelined, _ = train_here(
        folder, count, case, pipeline_execution_with_tensor_core=False
    )
    differs = {
        name
        for name, value in activations[0].items()
        if not np.array_equal(value, unpipelined[0][name])
    }
    assert {"1 title", "3 one/title", "3 two/title"} <= differs
    assert not {"0 title", "10 title"} & differs


@pytest.mark.exhaustive
@pytest.mark.slow
def test_folded_gradients_are_pipelined(run):
    folder = run(2, "closed", "folded")
    activations, found = train_here(folder, 2, "closed")
    for worker in range(2):
        for name, expected in (
            ("found", found),
            ("activations", activations[worker]),
        ):
            values = np.load(folder / f"{name}_{worker}.npz")
            for key, value in expected.items():
                # The gradients are summed in another order.
                np.testing.assert_allclose(
                    values[key],
                    value,
                    rtol=0.05,
                    atol=0.05 if "user" in key else 1e-5,
                    err_msg=key,
                )
