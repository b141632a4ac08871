"""Several processes change gradients before they apply them."""

import json

import numpy as np
import pytest

from tests import processes
from tests.embedding.process_sharded import changed_gradients_program as program

# Starting the processes takes most of the time of the test.
DEADLINE_SECONDS = 240

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def expected_step():
    """Returns the norms, the gradients of weights and the rows."""
    rows = program.START.astype(np.float64)
    norms, of_weights, moved = [], [], rows.copy()
    for ids, weights in zip(program.IDS, program.WEIGHTS):
        flat, first, slices = [], 0, []
        for bag in ids:
            w = np.array(weights[first : first + len(bag)])
            first += len(bag)
            mean = w @ rows[bag] / w.sum()
            upstream = np.cos(mean) / 2
            flat.extend((rows[bag] - mean) @ upstream / w.sum())
            slices.extend(
                (row, gain * upstream) for row, gain in zip(bag, w / w.sum())
            )
        norms.append(np.sqrt(sum((one**2).sum() for _, one in slices)))
        of_weights.append(flat)
        for row, one in slices:
            moved[row] -= program.RATE * one / norms[-1]
    return norms, of_weights, moved


@pytest.mark.parametrize("how", ["replicated", "sharded"])
def test_each_process_scales_its_gradients(how, tmp_path):
    processes.run_in_folder(tmp_path, program, how, seconds=DEADLINE_SECONDS)
    norms, of_weights, rows = expected_step()
    for worker in range(2):
        found = json.loads((tmp_path / f"{worker}.json").read_text())
        assert found["norm"] == pytest.approx(norms[worker], rel=1e-5)
        np.testing.assert_allclose(
            found["of_weights"], of_weights[worker], rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(found["rows"], rows, rtol=1e-5, atol=1e-6)
        assert "clip_by_norm" in found["error"]
