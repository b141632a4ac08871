"""Tests the times of layouts on small graphs.

All speeds are 1, so that a time is a number of operations or bytes. The latency
of a collective is 1,000,000, so that the time shows the number of collectives.
The expected times are sums that are written out.
"""

import dataclasses

import pytest

from tf_layoutmap.planning import layout_costs
from tf_layoutmap.planning.layout_choices import Grouping, MeshAxes
from tf_layoutmap.planning.layout_costs import LayoutCosts
from tf_layoutmap.planning.step_graph import Op, StepGraph, Tensor

SAMPLES, ONE, TWO, THREE = 8, 16, 12, 4
LATENCY = 1_000_000


@dataclasses.dataclass(frozen=True)
class UnitCosts:
    """All-gathers take twice as long per byte as all-reduces."""

    flops: float = 0.0
    copies: float = 0.0

    def seconds_of_collective(self, num_bytes, num_devices):
        return (LATENCY + num_bytes) if num_devices > 1 else 0.0

    def seconds_of_gather(self, num_bytes, num_devices):
        return (LATENCY + 2 * num_bytes) if num_devices > 1 else 0.0

    def seconds_of_flops(self, num_flops):
        return self.flops * num_flops

    def seconds_of_copy(self, num_bytes):
        return self.copies * num_bytes


def product(x, kernel, output, sizes):
    """Returns the product of a matrix of samples and a kernel."""
    return Op(
        "product",
        (x, kernel),
        (output,),
        (((0, 0), (0, 0)), ((1, 1), (0, 1))),
        (((0, 1), (1, 0)),),
        2 * SAMPLES * sizes[0] * sizes[1],
    )


def two_layers():
    """Returns the graph of `relu(x @ first) @ second`."""
    shapes = [
        (SAMPLES, ONE),  # 0: inputs
        (ONE, TWO),  # 1: first
        (SAMPLES, TWO),  # 2: product
        (SAMPLES, TWO),  # 3: relu
        (TWO, THREE),  # 4: second
        (SAMPLES, THREE),  # 5: outputs
    ]
    weights = {1: 0, 4: 1}
    return StepGraph(
        [
            Tensor(shape, weight=weights.get(number))
            for number, shape in enumerate(shapes)
        ],
        [
            product(0, 1, 2, (ONE, TWO)),
            Op("other", (2,), (3,), (((0, 0), (0, 0)), ((0, 1), (0, 1)))),
            product(3, 4, 5, (TWO, THREE)),
        ],
        2,
        batch=[0],
        features=[0],
    )


def lookup():
    """Returns a graph that looks up rows of a table with 32 rows."""
    return StepGraph(
        [
            Tensor((SAMPLES,)),
            Tensor((32, ONE), weight=0),
            Tensor((SAMPLES, ONE)),
        ],
        [Op("lookup", (1, 0), (2,), (((1, 0), (0, 0)), ((0, 1), (0, 1))))],
        1,
        batch=[0],
    )


def costs_of(graph, shapes, mesh, speed=UnitCosts(), *, num_slots=0):
    """Returns the costs, and the groups with their options by name."""
    groups = Grouping(graph, shapes, mesh, lambda w, axes: None).groups()
    costs = LayoutCosts(
        graph,
        shapes,
        [4] * len(shapes),
        [True] * len(shapes),
        lambda w, local: 4 * num_slots * _count(local),
        mesh,
        speed,
        (
            one.shared
            for group in groups
            for one in group.options
            if one.shared is not None
        ),
    )
    return costs, groups


def _count(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def options(group):
    return {one.name: one for one in group.options}


MODEL = MeshAxes({"model": 2}, None)
BOTH = MeshAxes({"batch": 2, "model": 2}, "batch")


def test_columns_then_rows_sum_the_result_of_the_second_product():
    costs, (group,) = costs_of(two_layers(), [(ONE, TWO), (TWO, THREE)], MODEL)
    one = options(group)["columns then rows over model"]
    # The inputs do not depend on weights, so that they have no gradient.
    assert costs.seconds(group, one)["collectives"] == (
        LATENCY + 4 * SAMPLES * THREE
    )
    assert costs.spread(group, one) == set()


def test_columns_of_each_matrix_gather_the_argument_of_the_second():
    costs, (group,) = costs_of(two_layers(), [(ONE, TWO), (TWO, THREE)], MODEL)
    one = options(group)["columns of each matrix over model"]
    hidden = 4 * SAMPLES * TWO
    # The hidden activations are gathered, their gradient is summed, and the
    # loss is reduced over the sharded outputs.
    assert costs.seconds(group, one)["collectives"] == (
        (LATENCY + 2 * hidden)
        + (LATENCY + hidden)
        + layout_costs._SUMS_OF_LOSS * LATENCY
    )


def test_gradients_are_summed_along_the_axis_of_the_batch():
    costs, (group,) = costs_of(two_layers(), [(ONE, TWO), (TWO, THREE)], BOTH)
    one = options(group)["replicate"]
    assert costs.seconds(group, one)["collectives"] == (
        2 * LATENCY + 4 * (ONE * TWO + TWO * THREE)
    )
    gathered = options(group)["gathered along batch"]
    assert costs.seconds(group, gathered)["collectives"] == (
        2 * LATENCY
        + 4 * (ONE * TWO + TWO * THREE)
        + 2 * LATENCY
        + 2 * 4 * (ONE * TWO + TWO * THREE)
    )


def test_products_without_a_gradient_of_the_argument_are_two():
    shapes = [(ONE, TWO), (TWO, THREE)]
    costs, (group,) = costs_of(
        two_layers(), shapes, MODEL, UnitCosts(flops=1.0)
    )
    seconds = costs.seconds(group, options(group)["replicate"])
    first, second = (2 * SAMPLES * a * b for a, b in shapes)
    assert seconds["compute"] == 2 * first + 3 * second
    sharded = costs.seconds(
        group, options(group)["columns then rows over model"]
    )
    assert sharded["compute"] == (2 * first + 3 * second) / 2


def test_elementwise_operations_and_the_loss_are_sharded_with_their_group():
    shapes = [(ONE, TWO), (TWO, THREE)]
    costs, groups = costs_of(two_layers(), shapes, MODEL, UnitCosts(copies=1.0))
    (group,) = groups
    weights = layout_costs._WEIGHT_COPIES * 4 * (ONE * TWO + TWO * THREE)
    hidden = layout_costs._COPIES_OF_OP * 4 * SAMPLES * TWO
    loss = layout_costs._COPIES_OF_LOSS * 4 * SAMPLES * THREE
    found = options(group)
    assert costs.seconds(group, found["replicate"])["compute"] == (
        weights + hidden + loss
    )
    assert costs.seconds(group, found["columns then rows over model"])[
        "compute"
    ] == (weights / 2 + hidden / 2 + loss)
    assert costs.fixed_seconds(groups) == {"compute": 0}


@pytest.mark.parametrize("num_slots, num_dense", [(0, 1), (1, 2), (2, 2)])
def test_a_replicated_table_sums_dense_gradients(num_slots, num_dense):
    costs, (group,) = costs_of(lookup(), [(32, ONE)], BOTH, num_slots=num_slots)
    seconds = costs.seconds(group, options(group)["replicate"])
    assert seconds["collectives"] == num_dense * (LATENCY + 4 * 32 * ONE)


def test_a_table_with_sharded_rows_exchanges_the_rows_of_all_samples():
    costs, (group,) = costs_of(lookup(), [(32, ONE)], BOTH)
    rows = 4 * SAMPLES * ONE
    seconds = costs.seconds(group, options(group)["rows over model"])
    assert seconds["collectives"] == (
        LATENCY  # Ids.
        + (LATENCY + rows)  # The rows are summed.
        + (LATENCY + 2 * rows)  # Their gradients are gathered.
    )
    seconds = costs.seconds(group, options(group)["gathered along batch"])
    assert seconds["collectives"] >= LATENCY + (LATENCY + 2 * rows)


def lookup_and_product():
    """Returns the product of looked up rows and a kernel."""
    shapes = [(SAMPLES,), (32, ONE), (SAMPLES, ONE), (ONE, THREE)]
    shapes += [(SAMPLES, THREE)]
    weights = {1: 0, 3: 1}
    return StepGraph(
        [
            Tensor(shape, weight=weights.get(number))
            for number, shape in enumerate(shapes)
        ],
        [
            Op("lookup", (1, 0), (2,), (((1, 0), (0, 0)), ((0, 1), (0, 1)))),
            product(2, 3, 4, (ONE, THREE)),
        ],
        2,
        batch=[0],
    )


def test_sharded_columns_of_a_table_change_the_next_product():
    shapes = [(32, ONE), (ONE, THREE)]
    costs, groups = costs_of(lookup_and_product(), shapes, MODEL)
    table, head = groups
    (spread,) = costs.spread(table, options(table)["columns over model"])
    assert costs.spread(table, options(table)["rows over model"]) == set()
    # The result is summed, and the gradient of the kernel is gathered.
    found = options(head)
    assert costs.seconds_with_spread(head, found["replicate"], spread)[
        "collectives"
    ] == (LATENCY + 4 * SAMPLES * THREE) + (LATENCY + 2 * 4 * ONE * THREE)
    # Sharded rows of the kernel fit to the sharded activations.
    assert (
        costs.seconds_with_spread(head, found["rows over model"], spread)[
            "collectives"
        ]
        == 0
    )
    # With sharded columns, the activations are gathered.
    assert (
        costs.seconds_with_spread(head, found["columns over model"], spread)[
            "collectives"
        ]
        == LATENCY + 2 * 4 * SAMPLES * ONE
    )
    # Sharded rows of the kernel spread to a table with other layouts.
    assert costs.spread(head, found["rows over model"]) == {spread}
    assert costs.seconds_with_spread(
        table, options(table)["rows over model"], spread
    )["collectives"] == (LATENCY + 2 * 4 * SAMPLES * ONE)
