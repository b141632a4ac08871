"""Checks that layers match a single device under every layout of their weights.

Layouts may also use the mesh axis that shards batches.
"""

import pathlib
import subprocess
import sys

import pytest

from tests.layout.keras3 import layouts_of_layers
from tests.layout.keras3.test_agreement import EXPLORE

FEW = ["Dense", "abcd,cde->abe", "ReversibleEmbedding", "GroupQueryAttention"]


def cases():
    """Yields all pairs of a model and an order.

    `make test` runs each model with only one order and alternates between the
    orders.
    """
    for number, name in enumerate(layouts_of_layers.MODELS):
        for place, order in enumerate(layouts_of_layers.MAPS):
            marks = []
            if name not in FEW:
                marks.append(pytest.mark.slow)
            if place != number % len(layouts_of_layers.MAPS):
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(
                name, order, marks=marks, id=f"{'-'.join(order)}-{name}"
            )


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("name, order", list(cases()))
def test_fully_sharded_data_parallelism_matches_a_single_device(name, order):
    expected = layouts_of_layers.expected_of(name)
    axes = layouts_of_layers.map_of_all_weights(name, order)
    layouts_of_layers.assert_alike(name, axes, expected)


@pytest.mark.slow
@pytest.mark.skipif(not EXPLORE, reason="TF_LAYOUTMAP_EXPLORE=1 takes an hour")
@pytest.mark.parametrize("name", layouts_of_layers.MODELS)
def test_every_layout_of_every_weight_matches_a_single_device(name):
    run = subprocess.run(
        [sys.executable, "-m", "tests.layout.keras3.layouts_of_layers", name],
        cwd=pathlib.Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "refused: 0" in run.stdout, run.stdout
