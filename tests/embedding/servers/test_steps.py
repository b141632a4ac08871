"""Embeddings on two and on three servers, compared with the host engine."""

import pytest

from tests import processes
from tests.embedding.servers import program

pytestmark = pytest.mark.slow  # This module starts two clusters.

_SECONDS = 240


def run(num_servers, folder, other, names) -> dict:
    return processes.run_program(
        "tests.embedding.servers.program",
        str(num_servers),
        str(folder),
        str(other),
        *names,
        seconds=_SECONDS,
    )


def selected_cases(request, num_servers):
    """Returns the names of the cases that the selected tests require."""
    names, runs_all = [], num_servers == 2
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path != request.path:
            continue
        if params.get("found_on_both") == num_servers and "name" in params:
            names.append(f"optimizer {params['name']}")
        runs_all |= params.get("found") == num_servers
    others = [one for one in program.CASES if not one.startswith("optimizer ")]
    return names + (others if runs_all else list(ON_BOTH))


# Cases that `make test` runs on three servers, too.
ON_BOTH = ("stats", "checkpoint_of_another_number_of_servers")


@pytest.fixture(scope="module")
def two_servers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return run(2, folder, "", selected_cases(request, 2)), folder


@pytest.fixture(scope="module")
def three_servers(request, two_servers, tmp_path_factory):
    return run(
        3,
        tmp_path_factory.mktemp("three"),
        two_servers[1] / "servers",
        selected_cases(request, 3),
    )


@pytest.fixture(params=[2, 3])
def found_on_both(request):
    if request.param == 2:
        return request.getfixturevalue("two_servers")[0]
    return request.getfixturevalue("three_servers")


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.exhaustive)])
def found(request):
    if request.param == 2:
        return request.getfixturevalue("two_servers")[0]
    return request.getfixturevalue("three_servers")


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", program.OPTIMIZERS)
def test_tables_are_bitwise_equal_to_the_host_engine(found_on_both, name):
    assert found_on_both[f"optimizer {name}"] == []


def test_planned_tables_are_bitwise_equal_and_have_the_predicted_bytes(found):
    wrong, resident, predicted = found["planned"]
    assert wrong == []
    # A shard can have one row less than the largest shard of its table.
    assert all(
        0 <= more - size <= 2 * 4 * 4
        for size, more in zip(resident, predicted, strict=True)
    )
    assert len(resident) in (2, 3)


def test_16_bit_tables_are_bitwise_equal(found):
    assert found["half_tables"] == []


def test_quantized_rows_are_bitwise_equal(found):
    assert found["quantized"] == [True, []]


def test_bfloat16_transfers_have_bounded_errors_and_are_in_stats(found):
    assert found["bfloat16_on_the_wire"] == [
        True,
        True,
        "bfloat16",
        ["float32", "float32"],
    ]


def test_out_of_range_ids_are_dropped_or_clipped_equally(found):
    assert found["ids_out_of_range"] == []


def test_checkpoints_restore_on_host_and_on_servers(found):
    assert found["checkpoints"] == []


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


def test_a_checkpoint_restores_on_another_number_of_servers(three_servers):
    assert three_servers["checkpoint_of_another_number_of_servers"] == []


def test_stats_of_one_worker_have_no_staleness(found_on_both):
    num_updates, staleness, num_repeated, num_servers, wrong = found_on_both[
        "stats"
    ]
    assert num_updates == program.NUM_STEPS
    assert staleness == {"mean": 0, "max": 0}
    assert num_repeated == 0
    assert num_servers in (2, 3)
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


def test_a_forward_only_step_changes_nothing(found):
    assert found["forward_only"] == [True, []]


def test_a_step_can_be_inside_of_strategy_run(found):
    assert found["inside_strategy_run"] == []


def test_packed_batches_are_supported(found):
    assert found["packed"] == []


def test_shards_are_placed_on_the_server_with_fewest_bytes(two_servers):
    distributed, unpartitioned = two_servers[0]["shard_devices"]
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
    assert where[:2] == ["job:ps/task:0", "job:ps/task:1"]
    assert all(one.startswith("job:ps/") for one in where)


def test_a_step_calls_each_server_twice_for_any_number_of_tables(two_servers):
    (few, many), captured, waiting = two_servers[0]["calls_of_a_step"]
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


def test_open_tables_equal_one_process_with_two_calls(found):
    wrong, distributed, restored, tasks, calls, captured = found[
        "open_vocabulary"
    ]
    assert [wrong, distributed, restored] == [[], [], []]
    assert len(tasks) == 2
    num_servers = found["stats"][3]
    assert sorted(calls) == ["ApplyRows"] * num_servers + (
        ["FetchKeys"] * num_servers
    )
    assert captured == [f"task:{task}" for task in range(num_servers)]


def test_closures_count_and_sample_keys(found):
    assert found["sampled_keys"] == [True] * 4


def test_lookups_without_a_step_equal_the_host(found):
    assert found["looked_up_without_a_step"] == []


@pytest.mark.parametrize(
    "case, words",
    [
        ("pipelined", "`pipeline_execution_with_tensor_core` must be False"),
        ("host_asked_for", '`engine` must be "auto" under ParameterServer'),
        ("dequeue_elsewhere", "must be made in one tf.function"),
        ("traced_training", "must be a Python bool"),
    ],
)
def test_unsupported_calls_on_servers_raise(two_servers, case, words):
    assert words in two_servers[0][case]
