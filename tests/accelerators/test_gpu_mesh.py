"""Models train on a mesh of GPUs as without a mesh.

The functions that DTensor compiles for a GPU contain only ops that have kernels
on GPUs and on TPUs.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests import covering, processes
from tests.accelerators import fake_gpu, kernel_lists, mesh_program

SECONDS = 300


@pytest.fixture(scope="module")
def found(request):
    """Returns the results of the selected cases."""
    return processes.run_program(
        "tests.accelerators.mesh_program",
        str(fake_gpu.library()),
        *sorted(processes.selected(request, "case")),
        seconds=SECONDS,
    )


# Ops without a kernel, by the name of a list. With GPUs, such an op runs on the
# CPU.
WITHOUT_KERNEL = {
    "cuda_kernels_2.21.pb.gz": {
        "MatMul int32": "DTensor computes the coordinates of a device.",
    },
    "tpu_kernels_2.20.pb.gz": {
        "VarHandleOp": "TensorFlow creates variables outside of compiled code.",
        "ScatterNdNonAliasingAdd": "On a mesh of TPUs, `shard_map` uses "
        "UnsortedSegmentProd.",
    },
}

# Slow, because a process trains models on a mesh.
pytestmark = pytest.mark.slow

cases = pytest.mark.parametrize(
    "case",
    covering.but(
        mesh_program.CASES,
        "columns of a table",
        "GRU",
        "attention",
        "decoder",
        "experts",
        "convolutions",
    ),
)


@cases
def test_training_on_a_mesh_matches_a_single_device(case, found):
    assert not isinstance(found[case], str), found[case]
    plain, on_mesh, _ = found[case]
    np.testing.assert_allclose(on_mesh, plain, rtol=1e-4, atol=1e-4)


@cases
def test_each_op_of_a_step_has_a_kernel(case, found):
    assert not isinstance(found[case], str), found[case]
    missing = found[case][2]
    assert missing.pop("nodes") > 100
    for name, ops in missing.items():
        unexpected = {
            op: node
            for op, node in ops.items()
            if op not in WITHOUT_KERNEL[name]
            and op.split()[0] not in WITHOUT_KERNEL[name]
        }
        assert not unexpected, name


def test_tpus_have_a_kernel_of_the_op_that_reads_local_shards():
    found = kernel_lists.dtypes_of(
        "UnsortedSegmentProd", "tpu_kernels_2.20.pb.gz"
    )
    assert found >= {tf.float32, tf.bfloat16, tf.float16, tf.int32, tf.int64}
