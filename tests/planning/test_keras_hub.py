"""Compares plans with the layout maps that keras-hub ships."""

import pytest

from tests.real import placement
from tf_layoutmap.layout import explain
from tf_layoutmap.planning import keras_models, search

pytest.importorskip("keras_hub", exc_type=ImportError)

from tests.real.hub import own_maps


@pytest.mark.parametrize("name", own_maps.CASES)
def test_a_plan_needs_at_most_the_bytes_of_the_map_of_a_backbone(name):
    case = own_maps.CASES[name]
    model = case.make()
    inputs, _ = case.data(model)
    own, _ = placement.own_map(case.backbone)
    explanation = explain.explain(own, model)

    def problem(memory=None):
        return keras_models.problem_of_model(
            model, placement.AXES, memory, batch_size=8, inputs=inputs
        )

    limit = placement.bytes_with_adam(explanation) + sum(
        problem().fixed_memory.values()
    )
    memory = search.solve(problem(limit)).memory()[0]
    assert sum(memory.values()) <= limit
    assert memory["weights"] <= explanation.bytes_per_device
