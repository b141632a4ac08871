"""Splits the CPU before a test in this folder runs TensorFlow's first op."""

import pytest
import tensorflow as tf

from tests import strategies  # noqa: F401


@pytest.fixture(autouse=True)
def on_cpu():
    """Runs the ops on the CPU: most of them have no kernel for a GPU."""
    with tf.device("CPU:0"):
        yield
