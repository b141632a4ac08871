"""Tests tf_layoutmap.embedding.inputs: nested structures and their paths."""

import pytest
import tensorflow as tf

from tf_layoutmap.embedding import inputs


def test_paths_are_in_flatten_order():
    nest = {"b": (1, [2]), "a": 3}
    paths = inputs.flatten_with_paths(nest)
    assert paths == [("a", 3), ("b/0", 1), ("b/1/0", 2)]
    assert [leaf for _, leaf in paths] == tf.nest.flatten(nest)


def test_a_single_leaf_has_an_empty_path():
    assert inputs.flatten_with_paths(7) == [("", 7)]


def test_composite_tensors_are_leaves():
    ragged = tf.ragged.constant([[1]])
    [(path, leaf)] = inputs.flatten_with_paths({"a": ragged})
    assert path == "a"
    assert leaf is ragged


def test_structures_of_wrong_type_or_size_raise():
    with pytest.raises(TypeError, match="`features` must have the structure"):
        inputs.check_same_structure(
            [1, 2], "features", (1, 2), "feature_config"
        )
    with pytest.raises(
        TypeError, match=r"\(\., \[\.\]\),.*Received: \[\., \(\.,\)\],"
    ):
        inputs.check_same_structure(
            [1, (2,)], "features", (1, [2]), "feature_config"
        )
    with pytest.raises(ValueError, match=r"\['a', 'b'\].*Received.*\['a'\]"):
        inputs.check_same_structure(
            {"a": 1}, "features", {"a": 1, "b": 2}, "feature_config"
        )


def test_missing_weights_are_none_for_each_leaf():
    assert inputs.flatten_weights(None, {"a": 1, "b": 2}, like="x") == [
        None,
        None,
    ]
    assert inputs.flatten_weights(
        {"a": None, "b": 5}, {"a": 1, "b": 2}, like="x"
    ) == [None, 5]
