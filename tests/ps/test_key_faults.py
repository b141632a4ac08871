"""Tests restarts of workers while keys are counted, inserted and evicted."""

import json
import random
import time

import pytest

from tests.ps.cluster import Cluster
from tests.ps.train_keys import RATE

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "steps, prefetched, shared",
    [(1, 0, False), (4, 1, False), (1, 0, True), (4, 1, True)],
)
def test_keys_counts_and_rows_are_exact_if_workers_restart(
    tmp_path, steps, prefetched, shared
):
    dice = random.Random(2)
    with Cluster(tmp_path) as cluster:
        # With these options, a closure takes most of its time after its updates
        # were sent, so workers often die at that time.
        cluster.train(
            json.dumps(
                {
                    "work": 20000,
                    "chunk": 4 * steps,
                    "steps_per_closure": steps,
                    "prefetch_steps": prefetched,
                    "shared": shared,
                }
            ),
            module="tests.ps.train_keys",
        )
        cluster.wait_for("DONE", 90)
        # Workers are restarted until one worker has died after its updates
        # reached the servers.
        for deaths in range(1, 31):
            time.sleep(dice.uniform(0.1, 1))
            cluster.restart("worker", dice.randrange(2))
            if deaths >= 5 and "REPEATED" in cluster.log("chief").read_text():
                break
        # Each step inserts 24 keys, so that the table becomes full.
        cluster.wait_for(f"DONE {8 * steps}", 60)
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
    # Each row contains only gradients of its current key, not of earlier keys
    # of the row.
    assert set(found["stream_rows"]) <= {0.0, -RATE}
    # `on_evict` is called for each table with the vocabulary.
    owned = ["stream", "stream_2"] if shared else ["stream"]
    assert found["num_reported"] == dict.fromkeys(owned, stream["num_evicted"])
    assert set(found["reported_rows"]) <= {0.0, -RATE}
    if shared:
        # A key has the same number of updates in both tables.
        assert found["shared_rows"]["words_2"] == [
            [-2 * RATE * done] * 2,
            [-RATE * done] * 2,
        ]
        rows = found["shared_rows"]["stream_2"]
        assert {value for row in rows for value in row} <= {0.0, -RATE}
    assert found["deltas_are_equal"]
    assert found["num_deltas"] == done // (4 * steps)
    # The coordinator and each server have written a part.
    assert found["num_parts"] == 3
