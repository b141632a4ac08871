"""Embeddings over two and over three servers, beside the host engine."""

import pytest

from tests import processes
from tests.embedding.servers import program

pytestmark = pytest.mark.slow  # Two clusters.

_SECONDS = 240


def run(*arguments) -> dict:
    return processes.run_program(
        "tests.embedding.servers.program",
        *map(str, arguments),
        seconds=_SECONDS,
    )


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return run(2, folder), folder


@pytest.fixture(scope="module")
def by_three(by_two, tmp_path_factory):
    return run(3, tmp_path_factory.mktemp("three"), by_two[1] / "servers")


@pytest.fixture(params=[2, 3])
def found(request, by_two, by_three):
    return by_two[0] if request.param == 2 else by_three


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", program.OPTIMIZERS)
def test_tables_are_those_of_the_host_engine_to_the_bit(found, name):
    assert found[f"optimizer {name}"] == []


def test_so_are_tables_of_16_bits(found):
    assert found["half_tables"] == []


def test_so_are_rows_that_are_quantized(found):
    assert found["quantized"] == [True, []]


def test_bfloat16_on_the_wire_is_off_by_its_error_and_said_in_stats(found):
    assert found["bfloat16_on_the_wire"] == [
        True,
        True,
        "bfloat16",
        ["float32", "float32"],
    ]


def test_ids_out_of_range_are_dropped_or_clipped_as_there(found):
    assert found["ids_out_of_range"] == []


def test_checkpoints_go_both_ways(found):
    assert found["checkpoints"] == []


def test_tensorflows_own_class_reads_a_checkpoint_of_servers(found):
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


def test_another_number_of_servers_reads_a_checkpoint(by_three):
    assert by_three["checkpoint_of_another_number_of_servers"] == []


def test_stats_count_updates_and_no_staleness_of_one_worker(found):
    num_updates, staleness, num_repeated, num_servers, wrong = found["stats"]
    assert num_updates == program.NUM_STEPS
    assert staleness == {"mean": 0, "max": 0}
    assert num_repeated == 0
    assert num_servers in (2, 3)
    assert wrong == []


def test_an_update_between_fetch_and_apply_is_counted(found):
    assert found["stale_step"] == 1


def test_a_bad_id_is_an_error_there_and_changes_nothing(found):
    message, changed, trains_on = found["bad_id"]
    assert (
        "Feature 'shown', sample 1: id 11 is outside table 'ads' with 11 rows"
    ) in message.replace("\\", "")
    assert changed == []
    assert trains_on


def test_a_closure_that_comes_again_changes_nothing(found):
    refused, wrong, num_repeated = found["closure_run_again"]
    assert refused == []
    assert wrong == []
    assert num_repeated == 3


def test_a_second_step_in_a_closure_is_refused(found):
    (refused,), wrong = found["two_steps_in_a_closure"]
    assert "has already applied gradients of this embedding" in refused
    assert wrong == []


def test_a_forward_only_step_changes_nothing(found):
    assert found["forward_only"] == [True, []]


def test_a_step_may_be_inside_of_strategy_run(found):
    assert found["inside_strategy_run"] == []


def test_a_batch_may_be_packed(found):
    assert found["packed"] == []


def test_shards_are_where_the_fewest_bytes_are(by_two):
    ours, whole = by_two[0]["places"]
    # Of `words` 72, 48 and 48 bytes, then of `ads` 128, 128 and 96.
    assert ours == [
        ["task:0", "task:1", "task:1"],
        ["task:0", "task:1", "task:0"],
    ]
    assert whole == [["task:0", "task:1"]]


def test_servers_draw_the_first_values_of_one_process_themselves(found):
    wrong, num_drawn, where = found["first_values"]
    assert wrong == []
    # Three shards of three tables, and of the slot variables of all four.
    assert num_drawn == 3 * (3 + 4)
    assert where[:2] == ["job:ps/task:0", "job:ps/task:1"]
    assert all(one.startswith("job:ps/") for one in where)


def test_a_step_is_two_calls_of_each_server_for_any_number_of_tables(by_two):
    few, many = by_two[0]["calls_of_a_step"]
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
            for op, num_inputs in [("ApplyRows", 1), ("FetchRows", 1)]
        ]
    )


def test_so_it_is_with_keys_whose_tables_are_those_of_one_process(found):
    wrong, ours, restored, tasks, calls = found["open_vocabulary"]
    assert [wrong, ours, restored] == [[], [], []]
    assert len(tasks) == 2
    num_servers = found["stats"][3]
    assert sorted(calls) == ["ApplyRows"] * num_servers + (
        ["FetchKeys"] * num_servers
    )


def test_tables_on_servers_are_looked_up_without_a_step(found):
    assert found["looked_up_without_a_step"] == []


@pytest.mark.parametrize(
    "case, words",
    [
        ("pipelined", "`pipeline_execution_with_tensor_core` must be False"),
        ("host_asked_for", '`engine` must be "auto" under ParameterServer'),
        ("dequeue_elsewhere", "made in one tf.function"),
        ("traced_training", "must be a Python bool"),
    ],
)
def test_what_is_not_done_over_servers_is_refused(by_two, case, words):
    assert words in by_two[0][case]
