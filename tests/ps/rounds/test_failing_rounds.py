"""Tests rounds that repeatedly fail in one of several worker processes."""

import json

import pytest

from tests.ps.cluster import Cluster

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.


@pytest.mark.parametrize(
    "num_runs", [5, pytest.param(20, marks=pytest.mark.exhaustive)]
)
def test_a_run_counts_exactly_the_steps_in_its_tables_if_rounds_fail(
    tmp_path, num_runs
):
    with Cluster(tmp_path) as cluster:
        cluster.train(
            json.dumps({"num_runs": num_runs}),
            module="tests.ps.rounds.failing_program",
        )
        line = cluster.wait_for("FOUND ", 600)
    found = json.loads(line.partition("FOUND ")[2])
    assert len(found) == num_runs
    for one in found:
        assert one["rows"] == [one["num_done"]] * 2, one
        assert one["saved_rows"] == [one["num_saved"]] * 2, one
        assert one["num_saved"] == one["num_done"], one
    # Errors occurred, because the second worker's dataset ended or returned bad
    # batches.
    assert all(one["num_errors"] for one in found)
