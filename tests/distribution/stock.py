"""Abilities of `keras.distribution` on TensorFlow in the installed Keras."""

import contextlib
import inspect

import keras
import pytest

import tf_layoutmap as tlm
from tf_layoutmap._core import keras_private

# Before Keras 3.15, creating a distribution raises AttributeError on the
# TensorFlow backend, unless `tlm.distribution` is enabled.
CREATES_DISTRIBUTIONS = hasattr(
    keras_private.Distribution, "num_model_replicas"
)
# Before Keras 3.15, a variable of TensorFlow ignores its argument `layout`.
VARIABLES_KEEP_LAYOUTS = (
    "layout" in inspect.signature(keras.Variable).parameters
)

creates_distributions = pytest.mark.skipif(
    not CREATES_DISTRIBUTIONS,
    reason="This Keras creates no distribution on TensorFlow.",
)


def creating():
    """Returns a context in which distributions of Keras can be created."""
    return (
        contextlib.nullcontext()
        if CREATES_DISTRIBUTIONS
        else tlm.distribution.enabled()
    )
