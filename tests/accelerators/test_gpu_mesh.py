"""Models train on a mesh of GPUs as without a mesh."""

import numpy as np
import pytest

from tests import covering, processes
from tests.accelerators import fake_gpu, mesh_program

SECONDS = 300
# Cases that raise an error.
ERRORS = {"ShardedEmbedding with an optimizer": "requires a mesh of CPUs"}


@pytest.fixture(scope="module")
def found(request):
    """Returns the results of the selected cases."""
    return processes.run_program(
        "tests.accelerators.mesh_program",
        str(fake_gpu.library()),
        *sorted(processes.selected(request, "case")),
        seconds=SECONDS,
    )


# Slow, because a process trains models on a mesh.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    covering.but(
        mesh_program.CASES,
        "columns of a table",
        "GRU",
        "attention",
        "convolutions",
    ),
)
def test_training_on_a_mesh_matches_a_single_device(case, found):
    if case in ERRORS:
        assert ERRORS[case] in found[case]
        return
    assert not isinstance(found[case], str), found[case]
    plain, on_mesh = found[case]
    np.testing.assert_allclose(on_mesh, plain, rtol=1e-4, atol=1e-4)
