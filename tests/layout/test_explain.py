"""Checks the report that `explain` returns for a layout map and a model."""

import json

import keras
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

L = keras.layers


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(batch=2, model=2)


def model_of(units=6):
    return keras.Sequential(
        [keras.Input((4,)), L.Dense(units, name="d1"), L.Dense(8, name="d2")]
    )


def map_of(mesh, **keys):
    layout_map = tlm.LayoutMap(mesh)
    for key, axes in keys.items():
        layout_map[key.replace("__", ".")] = layout_of(mesh, *axes)
    return layout_map


def test_each_variable_has_its_key_layout_and_bytes(mesh):
    report = map_of(
        mesh, d1__kernel=(None, "model"), d2__kernel=("model", "batch")
    ).explain(model_of())
    assert report.ok and report.problems() == []
    kernel, bias, last, _ = report.variables
    assert (kernel.name, kernel.pattern) == ("d1.kernel", "d1.kernel")
    assert (kernel.axes, kernel.shape) == ((None, "model"), (4, 6))
    assert (kernel.bytes_per_device, kernel.bytes_total) == (48, 96)
    assert (bias.pattern, bias.axes) == (None, (None,))
    assert bias.bytes_per_device == bias.bytes_total == 24
    assert last.bytes_per_device * 4 == last.bytes_total
    assert report.bytes_total == 4 * (4 * 6 + 6 + 6 * 8 + 8)


def test_shadowed_keys_are_reported(mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["d1.*kernel"] = layout_of(mesh, None, "model")
    layout_map[".*kernel"] = layout_of(mesh, "model", None)
    report = layout_map.explain(model_of())
    assert [v.name for v in report.contested] == ["d1.kernel"]
    assert report.contested[0].shadowed == (".*kernel",)
    assert report.ok


def test_two_matching_keys_are_a_problem_in_a_strict_map(mesh):
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map["d1.*kernel"] = layout_of(mesh, None, "model")
    layout_map[".*kernel"] = layout_of(mesh, "model", None)
    report = layout_map.explain(model_of())
    assert not report.ok
    assert "matched by 'd1.*kernel', '.*kernel'" in report.problems()[0]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"d1__kernl": (None, "model")},
            "Key 'd1.kernl' matches no variable; the nearest name is "
            "'d1.kernel'",
        ),
        (
            {"d1__kernel": ("model",)},
            "d1.kernel: the layout has rank 1, the variable has rank 2: use "
            "(None, 'model')",
        ),
        (
            {"d1__kernel": (None, "model")},
            "d1.kernel: dimension 1 has size 7, which mesh axis 'model' of "
            "size 2 does not divide: use a multiple of 2 (next: 8)",
        ),
    ],
)
def test_fault_in_the_map_is_reported(mesh, keys, words):
    model = model_of(units=7)
    report = map_of(mesh, **keys).explain(model)
    assert not report.ok
    assert any(words in problem for problem in report.problems())
    assert words.split(": ")[-1][:30] in str(report).replace("\n", " ")


def test_shadowed_key_is_distinguished_from_unmatched_key(mesh):
    layout_map = map_of(mesh, d__kernel=(None, "model"))
    layout_map["d..kernel"] = layout_of(mesh, None, "model")
    layout_map["d2.kernel.*"] = layout_of(mesh, "model", None)
    unused = layout_map.explain(model_of()).unused
    assert unused["d2.kernel.*"].startswith(
        "matches only variables that an earlier key matches ('d..kernel')"
    )
    assert unused["d.kernel"].startswith("matches no variable")


def test_unknown_axis_is_reported(mesh):
    layout_map = tlm.distribution.LayoutMap()
    layout_map["d2.kernel"] = tlm.distribution.TensorLayout(
        (None, "model"), mesh
    )
    layout_map["d1.kernel"] = (None, "modle")
    assert (
        "mesh axis 'modle' is unknown; the mesh has 'batch', 'model': "
        "did you mean 'model'?" in layout_map.explain(model_of()).problems()[0]
    )


def test_layout_that_dtensor_does_not_support_is_reported(mesh):
    model = keras.Sequential([keras.Input((8, 8, 3)), L.Conv2D(4, 2, name="c")])
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map["c.kernel"] = layout_of(mesh, "model", None, None, None)
    problems = layout_map.explain(model).problems()
    assert "layer 'c' (Conv2D)" in problems[0]


def test_explain_under_the_scope_allocates_nothing(mesh):
    layout_map = map_of(mesh, d1__kernel=("model",))
    with pytest.raises(ValueError, match="nothing was allocated"):
        with tlm.layout_map_scope(layout_map):
            model = model_of()
            assert not layout_map.explain(model).ok
            assert all(v._value is None for v in model.weights)


def test_report_matches_the_layouts_that_the_scope_applies(mesh):
    layout_map = map_of(
        mesh, d1__kernel=(None, "model"), d2__kernel=("model", "batch")
    )
    explanation = layout_map.explain(model_of())
    with tlm.layout_map_scope(layout_map):
        model = model_of()
    for report, variable in zip(explanation.variables, model.weights):
        held = tf.experimental.dtensor.unpack(variable.value.read_value())
        assert {p.numpy().nbytes for p in held} == {report.bytes_per_device}
        assert report.name in (
            variable.path.replace("/", "."),
            variable.path.split("/", 1)[1].replace("/", "."),
        )


def test_layers_that_are_not_built_are_listed(mesh):
    model = keras.Sequential([L.Dense(2, name="later")])
    report = map_of(mesh).explain(model)
    assert "later" in report.unbuilt
    assert "later" in str(report)


def test_report_prints_as_a_table_and_is_plain_data(mesh):
    report = map_of(mesh, d1__kernel=(None, "model")).explain(model_of())
    text = str(report)
    for word in (
        "d1.kernel",
        "(None, 'model')",
        "(replicated)",
        "48 B",
        "batch=2 x model=2",
    ):
        assert word in text
    data = json.loads(json.dumps(report.as_dict()))
    assert data["variables"][0]["name"] == "d1.kernel"
    assert data["mesh"] == {"batch": 2, "model": 2}


def test_ten_thousand_unallocated_variables_are_explained(mesh):
    class Wide(keras.layers.Layer):
        def build(self, shape):
            self.parts = [
                self.add_weight(shape=(2, 2), name=f"part_{i}", trainable=True)
                for i in range(100)
            ]
            super().build(shape)

        def call(self, x):
            return x

    class WideModel(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Wide() for _ in range(100)]

    layout_map = tlm.LayoutMap(mesh)
    for i in range(10):
        layout_map[rf"blocks\.{i}\..*"] = layout_of(mesh, None, "model")
    # Creating weights under the scope must not allocate memory.
    with pytest.raises(KeyboardInterrupt):
        with tlm.layout_map_scope(layout_map):
            model = WideModel()
            for block in model.blocks:
                block.build((None, 2))
            report = layout_map.explain(model)
            # With this exception, the end of the scope does not allocate the
            # weights.
            raise KeyboardInterrupt
    assert len(report.variables) == 10_000
    assert sum(v.pattern is not None for v in report.variables) == 1000


@pytest.mark.parametrize("wrong", [3, None])
def test_argument_that_is_not_a_model_raises(mesh, wrong):
    with pytest.raises(TypeError, match="a Keras model or layer"):
        map_of(mesh).explain(wrong)


def test_weights_that_the_host_initializes_in_full_are_reported(mesh):
    layout_map = map_of(
        mesh, d1__kernel=(None, "model"), d2__kernel=("model", "batch")
    )
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                L.Dense(6, kernel_initializer="orthogonal", name="d1"),
                L.Dense(8, name="d2"),
                # A replicated weight is not reported.
                L.Dense(4, kernel_initializer="orthogonal", name="d3"),
            ]
        )
    report = layout_map.explain(model)
    assert [v.name for v in report.variables if v.initialized_in_full] == [
        "d1.kernel"
    ]
    assert "Initial value computed in full on the host: d1.kernel." in str(
        report
    )
