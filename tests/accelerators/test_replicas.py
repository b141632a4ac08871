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


@pytest.fixture(scope="module")
def on_host():
    """Returns the numbers of an emulated TPU with tables on the host."""
    return run("host")


# Slow, because each kind of replicas needs a process.
@pytest.mark.slow
def test_four_gpus_have_the_numbers_of_tables_beside_a_tpu(on_host):
    assert run("gpus", str(fake_gpu.library())) == on_host
    assert on_host["False"] != on_host["True"]


# A case of tests/contract compares both with a strategy of two replicas.
@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_emulated_tpu_has_the_numbers_of_tables_beside_it(on_host):
    assert run("tpu") == on_host
