"""Tests `tlm.ps.Run` without process failures."""

import json

import pytest

from tests.ps.cluster import Cluster
from tests.ps.train import ROW

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with Cluster(folder, num_workers=1) as cluster:
        cluster.train(module="tests.ps.run_program")
        line = cluster.wait_for("FOUND ", 150)
    return json.loads(line.partition("FOUND ")[2])


@pytest.mark.exhaustive
def test_calls_accumulate_steps_also_after_a_restart(found):
    (
        results,
        passed,
        more,
        is_right,
        num_done,
        is_right_again,
        (logged, logged_by_third),
        wrong,
    ) = found["calls_add_up"]
    # The results are sums of the row before the last closure. Each closure
    # subtracts 1/2 from each of 4 values.
    assert results == [-4.0, None, -12.0]
    assert is_right
    assert passed == [7, None, None, 7]
    assert more == [-16.0, 9, -22.0, 12]
    assert num_done == 15
    assert is_right_again
    none = "runs no step: 7 steps are done, of which 7 are from the restored"
    assert len(logged) == 2
    assert f"`steps(until=3)` {none}" in logged[0]
    assert f"`steps(until=7)` {none}" in logged[1]
    (only,) = logged_by_third
    assert "`steps(2)` runs 2 more steps after the 12 steps of the res" in only
    assert "requires exactly one of `count`" in wrong[0]
    assert "count=None, until=None" in wrong[0]
    assert "count=1, until=2" in wrong[1]
    assert "`until` must be at least 0" in wrong[2]


def test_a_step_may_be_a_tf_function(found):
    assert found["a_step_that_is_a_tf_function"] is True


def test_a_training_step_without_gradients_warns(found):
    warnings, is_right = found["a_step_without_gradients"]
    assert len(warnings) == 1
    assert "applies no gradients" in warnings[0]
    assert is_right


def test_a_dataset_function_may_use_its_input_context(found):
    assert found["a_dataset_with_input_context"] == [1, True]


def test_closures_may_apply_nothing(found):
    assert found["some_steps_apply_nothing"] is True


def test_a_variable_of_another_shape_raises_before_anything_is_restored(found):
    message, value, is_untouched = found["a_variable_of_another_shape"]
    assert "'dense' has shape [2], and [] in the checkpoint" in message
    assert value == [1.0, 2.0]
    assert is_untouched


def test_a_missing_object_raises_unless_allowed(found):
    message, num_done, is_right = found["a_missing_object"]
    assert "the objects lack ['dense']" in message
    assert "allow_missing=['dense']" in message
    assert num_done == 1
    assert is_right


def test_keys_and_16_bit_rows_are_restored(found):
    assert found["keys_and_16_bit_rows_are_restored"] == [5, [ROW]]


def test_changes_between_steps_are_saved(found):
    assert found["changes_between_steps_are_saved"] == [1, 7.0, True]


def test_a_run_is_created_again_after_a_resize(found):
    error, num_done, keys = found["a_run_after_a_resize"]
    assert "`save` of a tlm.ps.Run must be called" in error
    assert num_done == 5
    assert keys == [ROW]


def test_a_step_without_a_batch_does_nothing(found):
    num_done, count, nested, errors = found["a_step_without_a_batch"]
    assert num_done == count == nested == 3
    assert len(errors) == 3
    assert all("an infinite dataset" in one for one in errors)


def test_a_dataset_created_outside_raises_and_later_runs_work(found):
    errors, is_right = found["a_dataset_created_outside"]
    assert len(errors) == 2
    assert all(
        "must not use a tf.data.Dataset that was created outside" in one
        for one in errors
    )
    assert is_right


def test_each_step_counts_once_in_closures_of_several_steps(found):
    results, num_done, is_right = found["closures_of_several_steps"]
    # The results are sums of the row before the last step.
    assert results == [-2.0 * 6, -2.0 * 7, -2.0 * 10]
    assert num_done == 11
    assert is_right


def test_prefetched_rows_miss_only_updates_of_the_last_steps(found):
    cases = found["prefetched_rows"]
    for prefetch_steps, (is_right, staleness, follows) in cases.items():
        most = int(prefetch_steps)
        # A step and the next step have no common ids.
        assert is_right or most > 1
        assert staleness <= most
        # Whether a read follows an update in the traced closure.
        assert follows == [
            [update < read - most for update in range(5)] for read in range(5)
        ]


@pytest.mark.parametrize(
    "step, num_calls",
    [
        # The first of five steps is not joined with the second step.
        ("lambda", [2, 2, 3]),
        ("reads_the_table_first", [5, 5, 0]),
        ("reads_the_table_last", [5, 5, 0]),
        # Each update is joined with the second lookup of its step.
        ("looks_up_twice", [6, 1, 4]),
        ("looks_up_in_a_branch", [10, 5, 0]),
        ("trains_in_a_branch", [10, 5, 0]),
    ],
)
def test_updates_are_joined_with_later_reads_in_the_order_of_the_program(
    found, step, num_calls
):
    has_results, has_rows, calls = found["joined_calls"][step]
    assert has_results
    assert has_rows
    # Reads, updates and joined calls of a server in a closure of five steps.
    assert calls == num_calls


@pytest.mark.parametrize(
    "case, words",
    [
        ("a_function_that_was_traced_before", "was traced elsewhere"),
        ("a_dataset_that_ends", "`dataset_fn` must return an infinite dataset"),
        ("another_embedding", "`objects` must match the newest checkpoint"),
        ("folder_that_is_a_file", "FileExistsError"),
        ("no_objects", "`objects` must contain the objects to save"),
        ("no_function", "`step_fn` must be callable"),
        ("no_such_answer", "`on_server_loss` must be one of"),
        ("no_time", "`save_every` must be like"),
        ("no_time_to_connect", "`timeout_seconds` must be like"),
        ("nothing_kept", "`max_to_keep` must be at least 1"),
        ("too_many_prefetched", "must be less than `steps_per_closure`"),
        ("a_name", "`allow_missing` must be a bool or a list of names"),
        ("fewer_steps", "`count` must be at least 0"),
    ],
)
def test_invalid_arguments_raise(found, case, words):
    assert words in found[case]
