"""Configures logical CPU devices before these tests run a TensorFlow op."""

from tests import strategies  # noqa: F401
