"""Splits the CPU before a test in this folder runs TensorFlow's first op."""

from tests import strategies  # noqa: F401
