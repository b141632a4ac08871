"""Tests `fit` of Keras 3 models in several processes."""

import functools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests import processes, strategies
from tests.layers.keras3 import process_program as program

DEADLINE_SECONDS = 300

# The processes sum gradients and metrics in a different order than one replica.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Returns the folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("two")
    processes.run_workers(
        pathlib.Path(program.__file__),
        [[str(folder)]] * 2,
        folder,
        DEADLINE_SECONDS,
    )
    return folder


def results_of(folder, kind, how, worker):
    path = folder / f"{kind}_{how}_{worker}"
    return json.loads(path.with_suffix(".json").read_text()), np.load(
        path.with_suffix(".npz")
    )


@functools.cache
def expected_results(kind, num_replicas):
    # Tables can be sharded only over processes, and equal replicated tables.
    kind = "copied" if kind == "sharded" else kind
    return program.train(strategies.mirrored(num_replicas), kind)


def assert_close(found, expected):
    """Compares nested structures of numbers, such as logs."""
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(
        tf.nest.flatten(found), tf.nest.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), program.CASES)
def test_two_processes_equal_one_process_with_joined_batches(
    kind, how, two_processes
):
    first, arrays = results_of(two_processes, kind, how, 0)
    second, others = results_of(two_processes, kind, how, 1)
    # All processes have the same logs, predictions, weights and tables.
    assert first == second
    assert arrays.files == others.files
    for name in arrays.files:
        np.testing.assert_array_equal(arrays[name], others[name], name)

    expected, values = expected_results(kind, 1)
    assert len(first["history"]["loss"]) == 2
    assert first["history"].keys() == expected["history"].keys()
    for name in ("history", "evaluate"):
        assert_close(first[name], expected[name])
    assert set(arrays.files) == set(values)
    for name in arrays.files:
        np.testing.assert_allclose(
            arrays[name], values[name], err_msg=name, **CLOSE
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), program.CASES)
def test_logs_of_each_step_are_means_over_the_replicas(
    kind, how, two_processes
):
    found, _ = results_of(two_processes, kind, how, 0)
    expected, _ = expected_results(kind, 2)
    assert_close(found["steps"], expected["steps"])
