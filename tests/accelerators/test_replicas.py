"""One program has the same numbers on four GPUs and beside a TPU."""

import pytest

from tests import processes
from tests.accelerators import fake_gpu

SECONDS = 300


def run(kind, *arguments):
    return processes.run_program(
        "tests.accelerators.replicas_program",
        kind,
        *arguments,
        seconds=SECONDS,
    )


# Slow, because each kind of replicas needs a process.
@pytest.mark.slow
def test_tables_on_the_host_are_bitwise_equal_on_all_kinds_of_replicas():
    on_gpus = run("gpus", str(fake_gpu.library()))
    beside_tpu = run("host")
    assert on_gpus == beside_tpu
    assert beside_tpu == run("tpu")
    assert on_gpus["False"] != on_gpus["True"]
