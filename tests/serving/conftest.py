"""Splits the CPU before a test of this folder runs TensorFlow's first op."""

from tests import strategies  # noqa: F401
