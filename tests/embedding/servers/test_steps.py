"""Embeddings on a cluster with two servers and one worker.

`tests/contract` compares programs on such a cluster with the host.
"""

import pytest

from tests import processes
from tests.embedding.servers import program

pytestmark = pytest.mark.slow  # This module starts two clusters.

_SECONDS = 240


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run_program(
        "tests.embedding.servers.program",
        "2",
        str(tmp_path_factory.mktemp("two")),
        seconds=_SECONDS,
    )


@pytest.mark.exhaustive
def test_planned_tables_are_bitwise_equal_and_have_the_predicted_bytes(found):
    wrong, resident, predicted = found["planned"]
    assert wrong == []
    # A shard can have one row less than the largest shard of its table.
    assert all(
        0 <= more - size <= 2 * 4 * 4
        for size, more in zip(resident, predicted, strict=True)
    )
    assert len(resident) == 2


def test_quantized_rows_are_bitwise_equal(found):
    assert found["quantized"] == [True, []]


def test_bfloat16_transfers_have_bounded_errors_and_are_in_stats(found):
    assert found["bfloat16_on_the_wire"] == [
        True,
        True,
        "bfloat16",
        ["float32", "float32"],
    ]


def test_tensorflow_s_class_reads_a_checkpoint_of_servers(found):
    assert found["checkpoint_for_tensorflows_class"] == [
        [
            "users",
            "users/momenta",
            "users/velocities",
            "words",
            "words/accumulators",
        ],
        [],
    ]


def test_stats_of_one_worker_have_no_staleness(found):
    num_updates, staleness, num_repeated, num_servers, wrong = found["stats"]
    assert num_updates == program.NUM_STEPS
    assert staleness == {"mean": 0, "max": 0}
    assert num_repeated == 0
    assert num_servers == 2
    assert wrong == []


def test_an_update_between_fetch_and_apply_is_counted(found):
    assert found["stale_step"] == 1


def test_a_bad_id_raises_and_changes_nothing(found):
    message, changed, trains_on = found["bad_id"]
    assert (
        "Feature 'shown', sample 1: id 11 is outside table 'ads' with 11 rows"
    ) in message.replace("\\", "")
    assert changed == []
    assert trains_on


def test_a_repeated_closure_changes_nothing(found):
    messages, wrong, num_repeated = found["closure_run_again"]
    assert messages == []
    assert wrong == []
    assert num_repeated == 3


def test_a_second_step_in_a_closure_raises(found):
    (messages,), wrong = found["two_steps_in_a_closure"]
    assert "has already applied gradients of this embedding" in messages
    assert wrong == []


def test_shards_are_placed_on_the_server_with_fewest_bytes(found):
    distributed, unpartitioned = found["shard_devices"]
    # The shards of `words` have 72, 48 and 48 bytes. The shards of `ads` have
    # 128, 128 and 96 bytes.
    assert distributed == [
        ["task:0", "task:1", "task:1"],
        ["task:0", "task:1", "task:0"],
    ]
    assert unpartitioned == [["task:0", "task:1"]]


def test_servers_create_the_initial_values_of_one_process(found):
    wrong, num_drawn, where = found["initial_values"]
    assert wrong == []
    # Values are drawn for 3 shards of 3 tables, and for 3 shards of the slot
    # variables of 4 tables.
    assert num_drawn == 3 * (3 + 4)
    assert where == ["job:ps/task:0", "job:ps/task:1"]


def test_a_step_calls_each_server_twice_for_any_number_of_tables(found):
    (few, many), captured, waiting = found["calls_of_a_step"]
    # The function captures one resource for each server, and no variable.
    assert captured == [["task:0", "task:1"]] * 2
    # Such a dependency would cost another call per server.
    assert waiting == []
    assert (
        few
        == many
        == [
            [
                f"/job:ps/replica:0/task:{task}/device:CPU:0",
                f"LayoutMap>{op}",
                num_inputs,
                1,
            ]
            for task in (0, 1)
            for op, num_inputs in [("ApplyRows", 1), ("FetchServerRows", 1)]
        ]
    )


def test_closures_count_and_sample_keys(found):
    assert found["sampled_keys"] == [True] * 4


@pytest.mark.parametrize(
    "case, words",
    [
        ("pipelined", "`pipeline_execution_with_tensor_core` must be False"),
        ("host_asked_for", '`engine` must be "auto" under ParameterServer'),
        ("dequeue_elsewhere", "must be made in one tf.function"),
        ("traced_training", "must be a Python bool"),
    ],
)
def test_unsupported_calls_on_servers_raise(found, case, words):
    assert words in found[case]
