"""Stacks whose parts are read without a copy."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.mesh.tracing import default_mesh
from tf_layoutmap.layout.mesh.transfer import to_host, to_mesh
from tf_layoutmap.layout.ops import stacks

MESH = mesh_of(batch=2, model=2)
X = np.arange(16, dtype=np.float32).reshape(4, 4)


def used_ops(function, x):
    """Counts the ops between the inputs and the results of a function."""
    graph = function.get_concrete_function(x).graph
    waiting, used = [y.op for y in graph.outputs], set()
    while waiting:
        op = waiting.pop()
        if op not in used:
            used.add(op)
            waiting += [x.op for x in op.inputs]
    return collections.Counter(op.type for op in used)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_slices_of_a_stack_are_its_parts(axis):
    @tf.function(autograph=False)
    def function(x):
        stacked = stacks.stack([x, 2 * x, 3 * x], axis)
        before = [slice(None)] * (axis % 3)
        second, last = stacked[(*before, 1)], stacked[(*before, -1)]
        return second, last[1:], stacked[(*before, 0)][..., tf.newaxis]

    with default_mesh(MESH):
        x = to_mesh(X, layout_of(MESH, "batch", None))
        found = function(x)
        assert "ConcatV2" not in used_ops(function, x)
    expected = 2 * X, 3 * X[1:], X[..., np.newaxis]
    for a, b in zip(found, expected):
        np.testing.assert_array_equal(to_host(a), b)


def test_other_slices_read_the_stack():
    @tf.function(autograph=False)
    def function(x):
        stacked = stacks.stack([x, 2 * x, 3 * x], 0)
        return stacked[1:], stacked[:, 1]

    with default_mesh(MESH):
        found = function(to_mesh(X, layout_of(MESH, "batch", None)))
    expected = np.stack([X, 2 * X, 3 * X])
    for a, b in zip(found, (expected[1:], expected[:, 1])):
        np.testing.assert_array_equal(to_host(a), b)


def test_split_and_joined_keep_values_of_any_structure():
    @tf.function(autograph=False)
    def function(x):
        y = stacks.stack(
            [stacks.stack([x, 2 * x], 1), stacks.stack([3 * x, 4 * x], 1)], 1
        )
        structure = stacks.structure_of(y)
        # The second tensor is not a stack, so its parts are slices.
        parts = [*stacks.split(y, structure), *stacks.split(-y, structure)]
        remaining = iter(parts)
        return (
            parts,
            y,
            stacks.joined(remaining, structure),
            stacks.joined(remaining, structure),
        )

    with default_mesh(MESH):
        found = function(to_mesh(X, layout_of(MESH, "batch", None)))
    parts, y, first, second = tf.nest.map_structure(to_host, found)
    expected = [i * X for i in (1, 2, 3, 4, -1, -2, -3, -4)]
    np.testing.assert_array_equal(parts, expected)
    np.testing.assert_array_equal(first, y)
    np.testing.assert_array_equal(second, -y)
