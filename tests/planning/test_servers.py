"""Compares planned bytes with the bytes of real parameter servers."""

import json

import pytest

from tests.planning import servers_program as program
from tests.ps.cluster import Cluster

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.


@pytest.mark.exhaustive
def test_predicted_bytes_are_on_the_servers(tmp_path):
    with Cluster(tmp_path, program.NUM_SERVERS, num_workers=1) as cluster:
        cluster.train(module="tests.planning.servers_program")
        line = cluster.wait_for("FOUND ", 180)
    found = json.loads(line.partition("FOUND ")[2])
    assert found["num_done"] == program.NUM_STEPS
    assert found["choices"]["items"] == "rows over 2 servers"
    assert found["choices"]["brands"].startswith("table on server")
    parts = ("weights", "slot variables", "keys", "closures")
    planned = [sum(one.get(p, 0) for p in parts) for one in found["planned"]]
    assert found["resident"] == pytest.approx(planned, rel=0.01)
