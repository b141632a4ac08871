"""Checks how differences between messages of processes are reported."""

import pytest

from tf_layoutmap.layout.processes import compare


def message(**changes):
    return {
        "kind": "train",
        "step": 2,
        "is_full": False,
        "times_set": 1,
        "batch": [
            ["x", "float32", [8, 3]],
            ["y", "int64", [8]],
            ["w", "None", None],
        ],
        **changes,
    }


def test_number_of_samples_is_not_a_difference():
    smaller = [
        ["x", "float32", [5, 3]],
        ["y", "int64", [5]],
        ["w", "None", None],
    ]
    assert compare.step_difference([message(), message(batch=smaller)]) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "test"}, "process 1 before step 2 of evaluating"),
        ({"step": 3}, "process 1 before step 3 of training"),
        ({"is_full": True}, "process 1 everything"),
        ({"times_set": 0}, "1 times in process 0 and 0 times in process 1"),
        (
            {"batch": [["x", "float32", [8, 4]]]},
            "batch x is float32 ['samples', 3] in process 0 and float32 "
            "['samples', 4] in process 1",
        ),
        (
            {"batch": message()["batch"][:2]},
            "batch w is in process 0 and not in process 1",
        ),
    ],
)
def test_other_differences_are_reported(changes, words):
    assert words in compare.step_difference([message(), message(**changes)])


def test_first_different_process_is_reported():
    found = [message(), message(), message(step=4), message(step=5)]
    assert "process 2 before step 4" in compare.step_difference(found)


@pytest.mark.parametrize(
    "batch, size",
    [
        ([["x", "float32", [8, 3]], ["w", "None", None]], 8),
        ([["x", "float32", [8, 3]], ["y", "int64", [4]]], None),
        ([["x", "float32", []]], None),
        ([], None),
    ],
)
def test_batch_size_requires_the_same_size_in_all_tensors(batch, size):
    assert compare.batch_size(batch) == size


def test_shards_in_only_one_process_may_differ():
    assert (
        compare.parts_difference(
            "batch", [[["x", {"0:4": 1}]], [["x", {"4:8": 2}]]]
        )
        is None
    )


def test_shards_in_two_processes_must_be_equal():
    found = [
        [["x", {}], ["y", {"0:4": 1, "4:8": 5}]],
        [["x", {}], ["y", {"0:4": 1}]],
        [["x", {}], ["y", {"4:8": 6}]],
    ]
    assert compare.parts_difference("batch", found) == (
        "batch y has different values in process 2 and in process 0, in the "
        "shard 4:8 that both hold"
    )
