"""Tests the classes of dimensions of small graphs."""

import pytest

from tf_layoutmap.planning.step_graph import (
    Op,
    StepGraph,
    Tensor,
    Use,
    reshaped_dims,
)


class Graph:
    """Builds a `StepGraph` operation by operation."""

    def __init__(self, *input_shapes):
        self.tensors, self.ops, self.num_weights = [], [], 0
        self.inputs = [self.add(shape) for shape in input_shapes]

    def add(self, shape, weight=None):
        self.tensors.append(Tensor(tuple(shape), 4, weight))
        return len(self.tensors) - 1

    def weight(self, *shape):
        self.num_weights += 1
        return self.add(shape, self.num_weights - 1)

    def op(self, kind, inputs, shape, same=(), contracted=(), **options):
        out = self.add(shape)
        pairs = tuple(same), tuple(contracted)
        self.ops.append(Op(kind, tuple(inputs), (out,), *pairs, **options))
        return out

    def product(self, x, w):
        """Returns the matrix product of two matrices."""
        rows, inner = self.tensors[x].shape
        columns = self.tensors[w].shape[1]
        return self.op(
            "product",
            (x, w),
            (rows, columns),
            [((0, 0), (0, 0)), ((1, 1), (0, 1))],
            [((0, 1), (1, 0))],
            flops=2 * rows * inner * columns,
        )

    def sum(self, x, y, kind="sum"):
        """Returns an elementwise sum, with broadcasting."""
        shape = self.tensors[x].shape
        same = [
            ((i, d), (0, d + len(shape) - len(self.tensors[t].shape)))
            for i, t in enumerate((x, y))
            for d in range(len(self.tensors[t].shape))
        ]
        return self.op(kind, (x, y), shape, same)

    def build(self):
        return StepGraph(
            self.tensors, self.ops, self.num_weights, self.inputs, self.inputs
        )


def mlp():
    """Returns an MLP: weight 0 and its bias 1, then weight 2."""
    graph = Graph((8, 4))
    up, bias, down = graph.weight(4, 6), graph.weight(6), graph.weight(6, 2)
    hidden = graph.sum(graph.product(0, up), bias)
    graph.product(hidden, down)
    return graph.build()


def test_columns_biases_and_rows_are_one_class():
    graph = mlp()
    root = graph.class_of_weight(0, 1)
    assert graph.class_of_weight(1, 0) == graph.class_of_weight(2, 0) == root
    assert graph.members[root] == {(0, 1), (1, 0), (2, 0)}
    assert graph.sizes[root] == {6}
    assert graph.class_of_weight(0, 0) == graph.class_of(0, 1) != root
    assert not graph.is_cyclic(root)
    # The first use sums over the rows. The bias belongs to no product.
    up, down = Use(0, (0,), {1: 1}), Use(2, (0,), {1: 1})
    assert graph.uses == [[up], [], [down]]
    assert [*graph.rows_and_columns(root)] == [
        (0, 1, up, False),
        (2, 0, down, True),
    ]


def test_a_bias_belongs_to_the_product_to_which_it_is_added():
    graph = mlp()
    assert graph.added_to == {1: 0}
    assert graph.other_uses == [[], [1], []]


def test_only_the_first_dimension_of_inputs_contains_samples():
    graph = mlp()
    assert [t for t in range(len(graph.tensors)) if graph.is_batch(t)] == [
        0,
        *range(4, 7),
    ]
    assert not graph.is_batch(1)


def test_a_class_is_divisible_if_all_of_its_sizes_are():
    graph = Graph((8, 6))
    up, down = graph.weight(6, 12), graph.weight(4, 2)
    hidden = graph.product(0, up)
    # The 12 columns are 4 heads of 3 columns.
    heads = graph.op("other", (hidden,), (8, 4, 3), [((0, 1), (0, 1))])
    graph.op(
        "product",
        (heads, down),
        (8, 3, 2),
        [((0, 0), (0, 0)), ((0, 2), (0, 1)), ((1, 1), (0, 2))],
        [((0, 1), (1, 0))],
        flops=1,
    )
    built = graph.build()
    root = built.class_of_weight(0, 1)
    assert built.class_of_weight(1, 0) == root
    assert built.sizes[root] == {4, 12}
    assert [n for n in range(1, 13) if built.is_divisible(root, n)] == [1, 2, 4]


def test_residual_connections_are_cyclic_and_the_mlp_inside_is_not():
    graph = Graph((8, 3))
    weights = [
        graph.weight(*shape) for shape in ((3, 4), (4, 6), (6, 4), (4, 2))
    ]
    x = graph.product(0, weights[0])
    inner = graph.product(graph.product(x, weights[1]), weights[2])
    graph.product(graph.sum(x, inner), weights[3])
    built = graph.build()
    residual, hidden = built.class_of_weight(0, 1), built.class_of_weight(1, 1)
    assert built.members[residual] == {(0, 1), (1, 0), (2, 1), (3, 0)}
    assert built.members[hidden] == {(1, 1), (2, 0)}
    assert built.is_cyclic(residual)
    assert not built.is_cyclic(hidden)


def test_scores_connect_queries_and_keys():
    graph = Graph((8, 4))
    queries, keys = (graph.product(0, graph.weight(4, 6)) for _ in range(2))
    graph.product(0, graph.weight(4, 5))
    graph.op(
        "product",
        (queries, keys),
        (8, 8),
        [((0, 0), (0, 0)), ((1, 0), (0, 1))],
        [((0, 1), (1, 1))],
    )
    built = graph.build()
    root = built.class_of_weight(0, 1)
    assert built.class_of_weight(1, 1) == root
    assert built.scores(root) == {0, 1}
    assert built.scores(built.class_of_weight(2, 1)) == set()


def test_a_transposed_weight_is_a_use_of_the_weight():
    graph = Graph((8, 3))
    weight = graph.weight(2, 3)
    swapped = graph.op(
        "other", (weight,), (3, 2), [((0, 0), (0, 1)), ((0, 1), (0, 0))]
    )
    graph.product(0, swapped)
    built = graph.build()
    assert built.uses == [[Use(1, (1,), {0: 1})]]
    assert built.class_of_weight(0, 1) == built.class_of(0, 1)


def test_channels_of_convolutions_are_not_joined():
    graph = Graph((8, 9, 3))
    first, second = graph.weight(3, 3, 4), graph.weight(3, 4, 6)
    x = 0
    for kernel, channels in ((first, 4), (second, 6)):
        x = graph.op(
            "convolution",
            (x, kernel),
            (8, 9, channels),
            [((0, 0), (0, 0))],
            flops=1,
            kernel=(1, 2, 2),
        )
    built = graph.build()
    assert built.uses == [[Use(0, (1,), {2: 2})], [Use(1, (1,), {2: 2})]]
    assert built.class_of_weight(0, 2) != built.class_of_weight(1, 1)
    assert built.is_batch(x)


def test_a_lookup_selects_rows_and_keeps_columns():
    graph = Graph((8,))
    table = graph.weight(10, 4)
    out = graph.op(
        "lookup",
        (table, 0),
        (8, 4),
        [((1, 0), (0, 0)), ((0, 1), (0, 1))],
    )
    built = graph.build()
    assert built.uses == [[Use(0, (0,), {1: 1})]]
    assert built.class_of_weight(0, 1) == built.class_of(out, 1)
    assert built.class_of_weight(0, 0) != built.class_of(out, 0)


def test_positions_that_two_layers_add_do_not_join_the_layers():
    graph = Graph((8, 4))
    indices = graph.add((6,))
    table = graph.weight(20)
    positions = graph.op("lookup", (table, indices), (6,), [((1, 0), (0, 0))])
    for _ in range(2):
        graph.sum(graph.product(0, graph.weight(4, 6)), positions)
    built = graph.build()
    assert built.class_of_weight(1, 1) != built.class_of_weight(2, 1)


def test_an_unused_weight_has_its_own_classes():
    graph = StepGraph([], [], 2)
    classes = {
        graph.class_of_weight(weight, dim)
        for weight in range(2)
        for dim in range(2)
    }
    assert len(classes) == 4
    assert graph.uses == [[], []]


@pytest.mark.parametrize(
    "before, after, pairs",
    [
        ((6,), (6,), [(0, 0)]),
        ((6,), (2, 3), [(0, 0)]),
        ((2, 3), (6,), [(0, 0)]),
        ((8, 12), (8, 3, 4), [(0, 0), (1, 1)]),
        ((8, 3, 4), (8, 12), [(0, 0), (1, 1)]),
        ((2, 3, 4), (6, 4), [(0, 0), (2, 1)]),
        ((1, 5), (5, 1), [(1, 0)]),
        # 4 x 6 elements in the order of 6 x 4 correspond in no dimension.
        ((4, 6), (6, 4), []),
        # The size of the first dimension is unknown.
        ((0, 4), (0, 4), []),
        ((), (1,), []),
    ],
)
def test_dimensions_of_a_reshape(before, after, pairs):
    assert reshaped_dims(before, after) == pairs
