"""Tests that workers can update the same variables and metrics of Keras 3."""

import json

import pytest

from tests.ps.cluster import Cluster
from tests.ps.keras3_counts_program import NUM_STEPS

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.


@pytest.mark.exhaustive
def test_counts_and_metrics_of_two_workers_are_complete(tmp_path):
    with Cluster(tmp_path) as cluster:
        cluster.train(module="tests.ps.keras3_counts_program")
        line = cluster.wait_for("FOUND ", 150)
        error = json.loads(cluster.wait_for("REFUSED ", 30).split(" ", 1)[1])
    found = json.loads(line.partition("FOUND ")[2])
    metrics = found.pop("metrics")
    assert len(found) == 4
    assert set(found.values()) == {NUM_STEPS}, found
    assert len(metrics) > 20
    for name, (counted, expected) in metrics.items():
        assert counted == expected, name
    assert "must be updated by `variable.assign_add(...)`" in error
    assert "Maximum" in error
    assert "largest" in error
