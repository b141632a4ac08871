"""Models train on a machine with GPUs as on a machine without GPUs."""

import numpy as np
import pytest

from tests import processes
from tests.accelerators import fake_gpu, gpu_program

NUM_GPUS = 2
SECONDS = 300


@pytest.fixture(scope="module")
def found(request):
    """Returns the results of the selected cases without and with GPUs."""
    names = sorted(processes.selected(request, "case"))
    path = str(fake_gpu.library())
    return [
        processes.run_program(
            "tests.accelerators.gpu_program",
            path,
            str(count),
            *names,
            seconds=SECONDS,
        )
        for count in (0, NUM_GPUS)
    ]


# Slow, because two processes import both versions of Keras.
@pytest.mark.slow
@pytest.mark.covering(1, 5)
@pytest.mark.parametrize("case", gpu_program.cases())
def test_training_matches_a_process_without_gpus(case, found):
    plain, on_gpus = (one[case] for one in found)
    assert not isinstance(plain, str), plain
    assert not isinstance(on_gpus, str), on_gpus
    for ours, expected in zip(on_gpus[:2], plain[:2]):
        # Without a GPU, TensorFlow fuses products with additions, which changes
        # the rounding.
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    # The tables of layers are in host memory, where their kernels run.
    assert on_gpus[2] == plain[2]
