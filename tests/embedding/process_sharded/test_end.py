"""When processes end that have run collectives together."""

import pytest

from tests import processes
from tests.embedding.process_sharded import end_program

# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 120

# The program starts two processes.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "how, code, waits",
    [
        ("normal", 0, True),
        pytest.param("late", 0, False, marks=pytest.mark.exhaustive),
        # Process 0 may wait for a process with an error.
        pytest.param("error", 1, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_process_waits_for_the_others_before_it_ends(
    how, code, waits, tmp_path
):
    workers = processes.start_workers(
        end_program, [[str(tmp_path), how]] * 2, tmp_path
    )
    try:
        assert workers[1].wait(DEADLINE_SECONDS) == code
        assert (tmp_path / "done").exists() == waits
    finally:
        for worker in workers:
            worker.kill()
