"""The number of threads of a process does not grow with its steps."""

import json

import pytest

from tests import processes
from tests.embedding.process_sharded import threads_program as program

# Starting the processes takes most of the time of the test.
DEADLINE_SECONDS = 240

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize("how", ["replicated", "sharded"])
def test_steps_and_reads_leave_no_threads(how, tmp_path):
    """A collective with a timeout leaves a thread until the timeout."""
    processes.run_in_folder(tmp_path, program, how, seconds=DEADLINE_SECONDS)
    for worker in range(2):
        counts = json.loads((tmp_path / f"{worker}.json").read_text())
        # Each step and each read runs several collectives.
        first, last = counts[program.NUM_CALLS - 1], counts[-1]
        assert last < first + program.NUM_CALLS / 2, counts
