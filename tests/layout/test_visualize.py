import keras
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import to_mesh

MESH = dict(batch=2, model=2)


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        (
            (None, "model"),
            ["[:, 0:3]      [:, 3:6]", "CPU:0 CPU:2   CPU:1 CPU:3"],
        ),
        (
            ("model", None),
            ["[0:2, :]", "CPU:0 CPU:2", "[2:4, :]", "CPU:1 CPU:3"],
        ),
        (
            ("batch", "model"),
            [
                "[0:2, 0:3]   [0:2, 3:6]",
                "CPU:0        CPU:1",
                "[2:4, 0:3]   [2:4, 3:6]",
                "CPU:2        CPU:3",
            ],
        ),
        ((None, None), ["[:, :]", "CPU:0 CPU:1 CPU:2 CPU:3"]),
    ],
)
def test_drawing_shows_which_device_holds_which_shard(axes, parts, capsys):
    mesh = mesh_of(**MESH)
    text = tlm.visualize_layout(
        to_mesh(tf.ones((4, 6)), layout_of(mesh, *axes))
    )
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0].endswith(f"layout {axes} on mesh batch=2 x model=2")
    assert lines[1:] == parts
    assert capsys.readouterr().out.strip() == text


def test_variables_and_scalars_are_drawn():
    with tlm.layout_map_scope(tlm.LayoutMap(mesh_of(**MESH))):
        scalar = keras.Variable(1.0, name="rate")
    text = tlm.visualize_layout(scalar, show=False)
    assert text.startswith("rate (), layout ()")
    assert "CPU:0 CPU:1 CPU:2 CPU:3" in text


@pytest.mark.parametrize("wrong", [tf.ones(3), keras.Variable(1.0), 3])
def test_value_that_is_not_on_a_mesh_raises(wrong):
    with pytest.raises(TypeError, match="on a mesh"):
        tlm.visualize_layout(wrong)
