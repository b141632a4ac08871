"""`python -m tf_layoutmap check` compares training steps with Keras alone."""

import keras
import numpy as np
import pytest

from tf_layoutmap import keras_check, process_report
from tf_layoutmap._core import patches


@pytest.mark.slow
def test_steps_are_equal_to_keras_alone():
    process_report.use_two_devices()
    assert keras_check.compare_with_stock().startswith("ok: a step on a mesh")


def test_other_weights_are_found():
    def model(value):
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        made.layers[0].kernel.assign(np.full([2, 2], value))
        return made

    keras_check._check_equal("A step", model(1.0), model(1.0))
    for value in (1.1, np.nan):
        with pytest.raises(RuntimeError, match="A step must compute the same"):
            keras_check._check_equal("A step", model(1.0), model(value))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_replicated_slot_variables_are_found(monkeypatch):
    """As with a Keras that drops the layouts of slot variables."""
    process_report.use_two_devices()
    patches.ensure("keras3")
    monkeypatch.setattr(
        "tf_layoutmap.layout.keras3.variable.MeshVariable._layout",
        property(lambda variable: None, lambda variable, layout: None),
    )
    with pytest.raises(RuntimeError, match="slot variables .* must be sharded"):
        keras_check.compare_with_stock()
