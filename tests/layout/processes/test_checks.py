"""Checks the errors if two processes get different data or act differently."""

import numpy as np
import pytest

from tests import processes
from tests.layout import pairs
from tests.layout.processes import process_programs
from tf_layoutmap import distribution

_SECONDS = 240
X, Y = process_programs.X, process_programs.Y


@pytest.mark.parametrize(
    "arguments, kind",
    [
        ({"every_step": 1}, TypeError),
        ({"deadline_seconds": 0}, ValueError),
        ({"deadline_seconds": "1"}, ValueError),
        ({"deadline_seconds": float("inf")}, ValueError),
    ],
)
def test_options_are_checked(arguments, kind):
    [name] = arguments
    with pytest.raises(kind, match=rf"`{name}` must be .*Received: {name}="):
        distribution.set_process_checks(**arguments)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run_clients(
        "tests.layout.processes.process_programs",
        tmp_path_factory.mktemp("clients"),
        seconds=_SECONDS,
    )


def history_of_one_process(sizes):
    """Trains on the same global batches in one process; returns the history."""
    model = pairs.plain(process_programs.make)
    data = [
        (X[start : start + size], Y[start : start + size])
        for start, size in sizes
    ]
    losses = {"loss": []}
    model.compile("sgd", pairs.loss())
    model.optimizer.learning_rate = 0.1
    for _ in range(2):
        # The losses are averaged here, because `train_on_batch` returns the
        # loss of one batch.
        found = [float(model.train_on_batch(x, y)) for x, y in data]
        losses["loss"].append(
            np.average(found, weights=[size for _, size in sizes])
        )
    return losses


def results(found, case):
    assert len(found) == 2
    return [one[case]["result"] for one in found]


def warnings(found, case):
    return [one[case]["warnings"] for one in found]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "case, sizes",
    [
        ("fewer_batches", [(0, 8), (8, 8), (16, 8)]),
        ("fewer_batches_of_a_dataset", [(0, 8), (8, 8), (16, 8)]),
        ("smaller_last_batch", [(0, 8), (8, 8), (16, 8), (24, 4)]),
        ("last_batch_that_does_not_divide", [(0, 8), (8, 8), (16, 8), (24, 5)]),
        ("same_held_tensor", [(0, 8), (8, 8), (16, 8), (24, 8)]),
        ("same_samples_on_one_model_axis", [(0, 8), (8, 8), (16, 8), (24, 8)]),
    ],
)
def test_uneven_data_matches_one_process(found, case, sizes):
    expected = history_of_one_process(sizes)["loss"]
    for result in results(found, case):
        np.testing.assert_allclose(result["loss"], expected, **pairs.TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_uneven_data_warns(found):
    first, second = warnings(found, "fewer_batches")
    # There are two warnings per epoch, one for training and one for evaluation.
    assert len(first) == 4 and not second
    assert (
        "Process 1 has no further batch, while process 0 continues (before "
        "step 4 of training)" in first[0]
    )
    for messages in warnings(found, "smaller_last_batch"):
        assert (
            "process 0 has 5 samples and process 1 has 8, at step 4 of "
            "training. All processes use the first 4" in messages[0]
        )
    assert warnings(found, "last_batch_that_does_not_divide") == [[], []]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tf_keras_stops_at_the_same_step_in_both_processes(found):
    model = process_programs.tf_keras_model()
    expected = process_programs.tf_keras_history(model, 24)
    for result in results(found, "tf_keras_fewer_batches"):
        pairs.assert_alike(result, expected)


DIFFERENT_STEPS = "ProcessError: All processes of model"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "case, words",
    [
        (
            "other_samples_on_one_model_axis",
            "step 1 of training: batch 0 has different values in process 1 "
            "and in ",
        ),
        (
            "other_samples_later",
            "step 3 of training: batch 0 has different values",
        ),
        (
            "other_optimizer",
            "optimizer class is Adam in process 0 and SGD in pro",
        ),
        ("other_learning_rate", "optimizer learning_rate is 0.00999"),
        ("tf_keras_other_learning_rate", "optimizer learning_rate is 0.00999"),
        ("other_dtype", "batch 1 is int64 ['samples'] in process 0 and int32"),
        (
            "other_layout",
            "'unsharded'] trainable in process 0 and float32 [8, 4] "
            "['unsharded', 'model'] trainable in process 1",
        ),
        ("other_first_weights", "d2/kernel has different values in process 1"),
        ("weights_set_in_one", "0 times in process 0 and 1 times in process 1"),
        ("other_verb", "1 of training, process 1 before step 1 of evaluating"),
    ],
)
def test_difference_raises_in_both_processes(found, case, words):
    for result in results(found, case):
        assert result.startswith(DIFFERENT_STEPS)
        assert words in result


@pytest.mark.exhaustive
@pytest.mark.slow
def test_different_host_tensors_raise_in_both_processes(found):
    for result in results(found, "other_held_tensor"):
        assert result.startswith("ProcessError: A host tensor")
        assert "copying a float32 tensor of shape (8, 8) to the mesh" in result


@pytest.mark.exhaustive
@pytest.mark.slow
def test_error_in_one_process_is_reported_by_the_other(found):
    for case, words in (
        ("data_that_fails", "no such file"),
        ("callback_that_fails", "disk is full"),
    ):
        first, second = results(found, case)
        assert first.startswith("ProcessError: Process 1 failed")
        assert words in first and words in second
        assert "ProcessError" not in second


@pytest.mark.exhaustive
@pytest.mark.slow
def test_uneven_predictions_raise(found):
    first, second = results(found, "predict_fewer_batches")
    assert len(first) == 8
    assert "Process 0 has no further batch, while process 1" in second
    for result in results(found, "predict_fewer_samples"):
        assert "process 0 has 8 samples and process 1 has 6" in result


@pytest.mark.exhaustive
@pytest.mark.slow
def test_missing_process_is_reported_after_the_deadline(found):
    first, second = results(found, "comes_too_late")
    assert first.startswith("ProcessError: Process 1 of 2 did not respond")
    assert f"within {process_programs.DEADLINE_SECONDS} s" in first
    # The late process must not start the step.
    assert second.startswith("ProcessError: Process 0 failed, while process 1")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_step_that_fails_in_one_process_ends_in_the_other(found):
    first, second = results(found, "bad_id_in_one")
    assert second.startswith("InvalidArgumentError")
    assert "9 is not in [0, 5)" in second
    assert first.startswith(
        "ProcessError: Another process failed and aborted "
        "step 2 of training of process 0: "
    )
    assert "Process 1 failed: InvalidArgumentError" in first
