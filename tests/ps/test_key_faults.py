"""Tests restarts of workers while keys are counted, inserted and evicted."""

import json
import random
import time

import pytest

from tests.ps.cluster import Cluster
from tests.ps.train_keys import RATE

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.


def test_keys_counts_and_rows_are_exact_if_workers_restart(tmp_path):
    dice = random.Random(2)
    with Cluster(tmp_path) as cluster:
        # Most of a closure's time is after its updates reach the servers.
        cluster.train(
            json.dumps({"work": 20000, "chunk": 4}),
            module="tests.ps.train_keys",
        )
        cluster.wait_for("DONE", 90)
        # Restarts workers until one died after its updates had reached
        # servers.
        for deaths in range(1, 31):
            time.sleep(dice.uniform(0.1, 1))
            cluster.restart("worker", dice.randrange(2))
            if deaths >= 5 and "REPEATED" in cluster.log("chief").read_text():
                break
        # Each closure inserts 24 keys, so that the table becomes full.
        cluster.wait_for("DONE 8", 60)
        found = cluster.finish(60)
    done = found["num_done"]
    assert found["num_repeated"] > 0
    assert found["steps"] == [[done], [done]]
    assert found["counts"] == {"7": 2 * done, "11": done}
    assert found["rows"] == {
        "7": [-2 * RATE * done] * 4,
        "11": [-RATE * done] * 4,
    }
    assert found["words"]["num_lookups"] == 3 * done
    assert found["words"]["num_admitted"] == 2
    stream = found["stream"]
    assert (
        stream["num_evicted"]
        == (stream["num_admitted"] - stream["num_keys"])
        > 0
    )
    # No row contains a gradient of a key that used the row before or after.
    assert set(found["stream_rows"]) <= {0.0, -RATE}
