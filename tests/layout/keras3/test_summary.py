"""Checks the lines about shards below `model.summary()`."""

import keras
import pytest

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.mesh import summary_lines
from tf_layoutmap.layout.mesh.summary_lines import Weight

# Weights of the Dense layers: 8 x 16, 16, 16 x 4 and 4 numbers of 4 bytes. The
# first three weights are sharded over two devices.
LINES = """\
 Mesh: batch=2, model=2
 Layout (None, 'model'): d1.kernel
 Layout ('model',): d1.bias
 Layout ('model', None): d2.kernel
 1 weight replicated on every device
 Weights per device: 432 of 848 bytes
"""


def test_the_layouts_follow_the_table(capsys):
    model = pairs.on_mesh(pairs.dense_model)
    model.summary()
    assert capsys.readouterr().out.endswith(LINES)


def test_the_layouts_are_printed_with_print_fn(capsys):
    printed = []
    pairs.on_mesh(pairs.dense_model).summary(80, None, printed.append)
    assert printed[-1] == LINES.removesuffix("\n")
    assert "Layer (type)" in printed[0] and len(printed) == 2
    assert capsys.readouterr().out == ""


def test_the_layouts_are_logged_if_interactive_logging_is_disabled(
    capsys, monkeypatch
):
    logged = []
    model = pairs.on_mesh(pairs.dense_model)
    monkeypatch.setattr(
        "tf_layoutmap.layout.mesh.summary_lines.logging.info", logged.append
    )
    keras.config.disable_interactive_logging()
    try:
        model.summary()
    finally:
        keras.config.enable_interactive_logging()
    assert logged[-1] == LINES.removesuffix("\n")
    assert capsys.readouterr().out == ""


def test_a_model_without_a_mesh_has_the_stock_summary():
    pairs.on_mesh(pairs.dense_model)  # Installs the replacements.
    printed = []
    pairs.plain(pairs.dense_model).summary(print_fn=printed.append)
    assert len(printed) == 1


def test_a_model_that_is_not_built_has_the_stock_summary():
    printed = []
    pairs.on_mesh(
        lambda: keras.Sequential([keras.layers.Dense(4, name="d1")])
    ).summary(print_fn=printed.append)
    assert len(printed) == 1


def test_the_summary_initializes_no_weight():
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    for key, axes in pairs.DENSE.items():
        layout_map[key] = layout_of(mesh, *axes)
    printed = []
    with tlm.layout_map_scope(layout_map):
        model = pairs.dense_model()
        pending = [one._value is None for one in model.weights]
        model.summary(print_fn=printed.append)
        assert [one._value is None for one in model.weights] == pending
    assert printed[-1] == LINES.removesuffix("\n")


@pytest.mark.parametrize("count", [4, 5, 200])
def test_weights_of_the_same_layout_share_a_line(count):
    lines = summary_lines.describe(
        [
            Weight(f"block_{i}/attention/kernel", ("model",), (5,), "float32")
            for i in range(count)
        ],
        mesh_of(model=2),
    )
    text = " ".join(line.strip() for line in lines)
    assert len(lines) <= 4 and max(map(len, lines)) <= 80
    assert "block_3/attention/kernel" in text
    assert (f"and {count - 4} more" in text) == (count > 4)
    assert f"{count * 12:,} of {count * 20:,} bytes" in text


def test_weights_whose_layouts_are_not_planned_are_counted():
    lines = summary_lines.describe(
        [Weight("kernel", None, (4, 4), "float32")], mesh_of(model=2)
    )
    assert lines[1:] == [
        " 1 weight without a layout until the layouts are planned"
    ]
