"""Checks the lines about shards below `model.summary()` of tf_keras."""

import numpy as np

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

# The scope supports tf_keras only if the program has imported it.
import tf_keras  # isort: skip


def model_of(axes):
    layout_map = tlm.LayoutMap(mesh_of(batch=2, model=2))
    for key, value in axes.items():
        layout_map[key] = layout_of(layout_map.get_default_mesh(), *value)
    with tlm.layout_map_scope(layout_map):
        model = tf_keras.Sequential(
            [tf_keras.Input((4,)), tf_keras.layers.Dense(6, name="d1")]
        )
        model(np.ones([2, 4], np.float32))
    return model


def test_the_layouts_follow_the_table(capsys):
    model_of({"d1.kernel": (None, "model")}).summary()
    assert capsys.readouterr().out.endswith(
        "\n Mesh: batch=2, model=2\n"
        " Layout (None, 'model'): d1/kernel\n"
        " 1 weight replicated on every device\n"
        " Weights per device: 72 of 120 bytes\n"
    )


def test_the_layouts_are_printed_with_print_fn(capsys):
    printed = []
    model_of({}).summary(print_fn=printed.append)
    assert printed[-1].splitlines() == [
        " Mesh: batch=2, model=2",
        " 2 weights replicated on every device",
        " Weights per device: 120 of 120 bytes",
    ]
    assert capsys.readouterr().out == ""
