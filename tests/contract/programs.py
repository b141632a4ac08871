"""All programs of the contract, by section and feature."""

from tests.contract import (
    sharded_layer,
    steps,
    tf_keras_layers,
    tpu_layer,
    v2_steps,
)

SECTIONS = {
    "loop": steps.PROGRAMS,
    "v2": v2_steps.PROGRAMS,
    "sharded": sharded_layer.PROGRAMS,
    "tpu": tpu_layer.PROGRAMS,
    "tf_keras tpu": tpu_layer.TF_KERAS_PROGRAMS,
    "tf_keras sharded": tf_keras_layers.PROGRAMS,
}


def program_of(section: str, feature: str) -> steps.Program:
    """Returns the program of a feature."""
    return SECTIONS[section][feature]
