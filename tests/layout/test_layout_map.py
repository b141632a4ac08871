"""Checks the documented examples and the errors of `LayoutMap`."""

import ast
import re

import keras
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

dtensor = tf.experimental.dtensor


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(batch=2, model=2)


@pytest.fixture
def layouts(mesh):
    return {
        rank: layout_of(mesh, *(None,) * (rank - 1), "model")
        for rank in (1, 2, 4)
    }


@pytest.fixture
def filled(mesh, layouts):
    layout_map = tlm.LayoutMap(mesh=None)
    layout_map[".*dense.*kernel"] = layouts[2]
    layout_map[".*dense.*bias"] = layouts[1]
    layout_map[".*conv2d.*kernel"] = layouts[4]
    layout_map[".*conv2d.*bias"] = layouts[1]
    return layout_map


@pytest.mark.parametrize(
    ("key", "rank"),
    [
        ("dense_1.kernel", 2),
        ("dense_1.bias", 1),
        ("dense_2.kernel", 2),
        ("dense_2.bias", 1),
        ("my_model/conv2d_123/kernel", 4),
        ("my_model/conv2d_123/bias", 1),
    ],
)
def test_documented_lookups(filled, layouts, key, rank):
    assert filled[key] == layouts[rank]
    assert filled.get(key) == layouts[rank]


def test_unmatched_name_gives_none(filled):
    assert filled["my_model/conv3d_1/kernel"] is None
    assert filled.get("my_model/conv3d_1/kernel") is None
    assert filled.get("my_model/conv3d_1/kernel", 7) == 7


def test_matching_is_anchored_at_the_start(mesh, layouts):
    layout_map = tlm.LayoutMap()
    layout_map["dense"] = layouts[1]
    assert layout_map["dense_1.bias"] == layouts[1]
    assert layout_map["my_dense"] is None


def test_mapping_holds_the_keys_in_insertion_order(filled, layouts):
    keys = [
        ".*dense.*kernel",
        ".*dense.*bias",
        ".*conv2d.*kernel",
        ".*conv2d.*bias",
    ]
    assert list(filled) == keys
    assert len(filled) == 4
    assert list(filled.items())[0] == (keys[0], layouts[2])
    assert keys[0] in filled
    assert "dense_1.kernel" not in filled


def test_next_match_applies_after_deletion(filled, layouts):
    filled[".*"] = layouts[4]
    del filled[".*dense.*kernel"]
    assert filled["dense_1.kernel"] == layouts[4]
    with pytest.raises(KeyError):
        del filled[".*dense.*kernel"]
    # Only stored keys can be deleted. A name that matches a key as a pattern is
    # not a stored key.
    with pytest.raises(KeyError):
        del filled["dense_1.bias"]


def test_pop_setdefault_and_update_use_stored_keys(filled, layouts):
    assert filled.pop(".*dense.*bias") == layouts[1]
    assert filled["dense_1.bias"] is None
    assert filled.pop("dense_1.kernel", "none") == "none"
    with pytest.raises(KeyError):
        filled.pop("dense_1.kernel")
    assert filled.setdefault("dense_1.kernel", layouts[1]) == layouts[1]
    assert filled["dense_1.kernel"] == layouts[1]
    filled.update({"new": layouts[2]})
    assert filled["new"] == layouts[2]


def test_setting_a_key_twice_raises(filled, layouts):
    with pytest.raises(ValueError, match="already exist"):
        filled[".*dense.*bias"] = layouts[1]


@pytest.mark.parametrize("wrong", [("batch",), "model", None, 3])
@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_value_that_is_not_a_layout_raises(filled, wrong, kind):
    with pytest.raises(kind, match="should be a dtensor.Layout"):
        filled["new"] = wrong
    assert "new" not in filled


@pytest.mark.parametrize("make", [tuple, list])
def test_tuple_of_axes_becomes_a_layout_on_the_default_mesh(mesh, make):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["kernel"] = make([None, "model"])
    layout_map["scalar"] = make([])
    assert layout_map["kernel"] == layout_of(mesh, None, "model")
    assert layout_map["scalar"] == layout_of(mesh)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (("model", "modle"), "mesh axes .*'batch', 'model'.* 'modle'"),
        ((0, None), "Received: 0 in"),
        (("model", "model"), "key 'kernel'"),
    ],
)
def test_tuple_with_other_elements_raises(mesh, axes, words):
    layout_map = tlm.LayoutMap(mesh)
    with pytest.raises(TypeError, match=words):
        layout_map["kernel"] = axes
    assert "kernel" not in layout_map


def test_layout_suggested_by_an_error_is_valid(mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["d.kernel"] = (None, "model", None)
    with pytest.raises(ValueError, match="use \\((.*)\\)") as caught:
        with tlm.layout_map_scope(layout_map):
            keras.Sequential(
                [keras.Input((8,)), keras.layers.Dense(8, name="d")]
            )
    advice = re.search(r"use (\(.*?\))", str(caught.value))[1]
    del layout_map["d.kernel"]
    layout_map["d.kernel"] = ast.literal_eval(advice)
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, name="d")]
        )
    assert layout_map.explain(model).ok


def test_key_that_is_not_a_string_raises(filled, layouts):
    with pytest.raises(TypeError, match="string"):
        filled[3] = layouts[1]
    with pytest.raises(TypeError, match="string"):
        filled[3]


def test_default_mesh_is_the_argument(mesh, filled):
    assert tlm.LayoutMap(mesh=mesh).get_default_mesh() == mesh
    assert filled.get_default_mesh() is None
    with pytest.raises(TypeError, match="Mesh"):
        tlm.LayoutMap(mesh="cpu")


def test_mesh_in_use_is_the_mesh_of_the_layouts(mesh, filled):
    assert filled.mesh_in_use() == mesh
    with pytest.raises(ValueError, match="needs a mesh"):
        tlm.LayoutMap().mesh_in_use()
    filled["other"] = layout_of(mesh_of(model=4), "model")
    with pytest.raises(ValueError, match="2 meshes"):
        filled.mesh_in_use()


def test_two_matches_raise_in_a_strict_map(mesh, layouts):
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map["d.*"] = layouts[1]
    layout_map[".*kernel"] = layouts[2]
    layout_map["d3.kernel"] = layouts[2]
    assert layout_map["d1.bias"] == layouts[1]
    assert layout_map["d3.kernel"] == layouts[2]
    with pytest.raises(ValueError, match="matched by"):
        layout_map["d1.kernel"]


def test_repr_shows_keys_and_axes(filled):
    assert "'.*dense.*bias': ('model',)" in repr(filled)


def test_a_device_mesh_names_the_class_that_accepts_it():
    mesh = tlm.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    with pytest.raises(TypeError, match="tlm.distribution.LayoutMap"):
        tlm.LayoutMap(mesh)
