"""Tests which errors of calls are replaced by errors of this package."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap._core import patches
from tf_layoutmap.ps import handled_errors, lost_calls, waiting


@pytest.fixture
def explained(monkeypatch):
    """Yields the errors that were replaced by the error `ps 1 is lost`.

    No op of this process raises one of the errors `LOST`, so the fixture sets
    another error.
    """
    found = []

    def explain(error):
        found.append(error)
        return lost_calls.error_of(
            waiting.ServerLostError, "ps 1 is lost", error
        )

    monkeypatch.setattr(
        handled_errors, "LOST", (tf.errors.InvalidArgumentError,)
    )
    monkeypatch.setattr(lost_calls, "_explain", explain)
    patches.install("ps_calls")
    yield found
    patches.uninstall("ps_calls")


def fail():
    return tf.debugging.check_numerics(np.nan, "a message")


# C++ code raises the errors of functions directly.
@pytest.mark.parametrize("call", [fail, tf.function(fail)])
def test_errors_of_ops_and_functions_are_explained_once(explained, call):
    with pytest.raises(waiting.ServerLostError, match="^ps 1 is lost$") as one:
        call()
    # Code that handles TensorFlow's error also handles this error.
    assert isinstance(one.value, tf.errors.UnavailableError)
    assert ["a message" in str(error) for error in explained] == [True]


@pytest.mark.parametrize(
    "name",
    ["TFE_Py_FastPathExecute", "TFE_Py_Execute", "TFE_Py_ExecuteCancelable"],
)
def test_errors_that_cc_functions_raise_are_explained(explained, name):
    """For example if an input of an op cannot be copied to a server."""

    def function():
        raise tf.errors.InvalidArgumentError(None, None, "a message")

    (entry,) = [
        one for one in patches.entries_of("ps_calls") if one.name == name
    ]
    with pytest.raises(waiting.ServerLostError, match="^ps 1 is lost$"):
        patches._replacement(entry, function)()
    assert len(explained) == 1


@pytest.mark.parametrize(
    "call", [tf.io.read_file, tf.function(tf.io.read_file)]
)
def test_other_errors_are_not_changed(explained, call):
    with pytest.raises(tf.errors.NotFoundError):
        call("/this file does not exist")
    assert not explained


def test_errors_with_a_handler_are_not_changed(explained):
    with handled_errors.error_handler():
        with handled_errors.error_handler():
            pass
        with pytest.raises(tf.errors.InvalidArgumentError, match="a message"):
            fail()
    assert not explained
    with pytest.raises(waiting.ServerLostError):
        fail()


def test_errors_of_threads_of_the_coordinator_are_not_changed(explained):
    found = []

    def run():
        try:
            fail()
        except tf.errors.OpError as error:
            found.append(error)

    for name in ("WorkerClosureProcessingLoop-0", "another thread"):
        thread = threading.Thread(target=run, name=name)
        thread.start()
        thread.join()
    assert [isinstance(one, waiting.ServerLostError) for one in found] == [
        False,
        True,
    ]
