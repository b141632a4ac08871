"""Tests the initialization of a single process and of several processes."""

import textwrap

import pytest

from tests import forked_process
from tests.processes import ROOT
from tf_layoutmap import distribution

_SECONDS = 120

# The program runs in another process, because initialization must be the first
# use of TensorFlow.
ALONE = textwrap.dedent("""
    import tensorflow as tf
    import tf_layoutmap as tlm

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2)
    tlm.distribution.initialize(num_processes=1, process_id=0)
    tlm.distribution.initialize(num_processes=1, process_id=0)
    mesh = tf.experimental.dtensor.create_distributed_mesh(
        [("batch", 2)], device_type="CPU")
    layout = tf.experimental.dtensor.Layout(["batch"], mesh)
    print("SUM", float(tf.reduce_sum(tlm.layout.to_host(
        tlm.layout.to_mesh(tf.range(4.0), layout)))))
""")


@pytest.mark.slow
def test_one_process_creates_the_mesh_of_a_multi_process_program():
    run = forked_process.run_code(
        ALONE, seconds=_SECONDS, cwd=ROOT, check=False
    )
    assert "SUM 6.0" in run.stdout, run.stderr[-2000:]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            {"num_processes": 2, "process_id": 2},
            "process_id=2, num_processes=2",
        ),
        (
            {"num_processes": 2, "process_id": 0, "job_addresses": "a:1"},
            "an address for each of the 2 processes",
        ),
    ],
)
def test_inconsistent_process_numbers_raise(arguments, words):
    with pytest.raises(ValueError, match=words):
        distribution.initialize(**arguments)
