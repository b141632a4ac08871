"""Tests that all workers can add to the same variable of Keras 3."""

import json

import pytest

from tests.ps.cluster import Cluster
from tests.ps.keras3_counts_program import NUM_STEPS

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.


def test_counts_of_two_workers_are_complete(tmp_path):
    with Cluster(tmp_path) as cluster:
        cluster.train(module="tests.ps.keras3_counts_program")
        line = cluster.wait_for("FOUND ", 150)
    found = json.loads(line.partition("FOUND ")[2])
    assert len(found) == 4
    assert set(found.values()) == {NUM_STEPS}, found
