"""Tests tf_layoutmap.embedding.build_shapes: shapes that `build` accepts."""

import collections

import pytest
import tensorflow as tf

from tf_layoutmap.embedding import build_shapes
from tf_layoutmap.embedding.configs import config

FEATURES = [
    config.FeatureSpec(name, 0, length)
    for name, length in (("a", 0), ("b", 3), ("c", 0))
]
NESTED = ({"x": "a", "y": "b"}, ["c"])
A, B, C = (tf.TensorShape([size, None]) for size in (1, 2, 3))
Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "shapes",
    [
        [A, B, C],
        (A, B, C),
        ((A, B), C),
        [A, [B, (C,)]],
        ({"y": B, "x": A}, [C]),
        [{"x": A, "y": B}, (C,)],
        ({"x": (1, 9), "y": [2, 9]}, [(3, None)]),
    ],
)
def test_lists_of_shapes_follow_the_order_of_features(shapes):
    assert build_shapes.read(NESTED, FEATURES, shapes) == [(1,), (2,), (3,)]


def test_a_single_feature_accepts_a_shape_or_a_list_of_one():
    for shapes in (A, [A], (A,), [1, None], (1, 7)):
        assert build_shapes.read("a", FEATURES[:1], shapes) == [(1,)]


@pytest.mark.parametrize(
    "shapes",
    [
        [A, B],
        [A, B, C, C],
        ({"x": A, "z": B}, [C]),
        {"x": A, "y": B, "c": C},
        [{"x": A, "y": B, "c": C}],
        Pair({"x": A, "y": B}, [C]),
    ],
)
def test_wrong_number_or_names_of_shapes_raise(shapes):
    with pytest.raises(
        (TypeError, ValueError), match="`per_replica_input_shapes` must have"
    ):
        build_shapes.read(NESTED, FEATURES, shapes)


def test_the_combined_last_dimension_is_dropped():
    shapes = [[4], [4, 2, 9], [None, 5, 2, 1]]
    assert build_shapes.read(
        NESTED, FEATURES, [tf.TensorShape(one) for one in shapes]
    ) == [(4,), (4, 2), (None, 5, 2)]
    with pytest.raises(ValueError, match="feature 'b'"):
        build_shapes.read(NESTED, FEATURES, [A, tf.TensorShape([]), C])


def test_sequence_length_is_appended_to_one_dimension():
    assert build_shapes.with_positions(FEATURES[1], (4,)) == (4, 3)
    assert build_shapes.with_positions(FEATURES[1], (4, 5)) == (4, 5)
    assert build_shapes.with_positions(FEATURES[0], (4,)) == (4,)
