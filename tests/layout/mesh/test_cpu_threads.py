"""Tests the number of threads that operations use if the CPU is split.

TensorFlow can set the number only before its first operation, so each case runs
in a separate process.
"""

import os

import pytest

from tests import forked_process

# Prints the number of intra-op threads that is set, the number of logical CPUs,
# and the number of threads of the process after the first operation.
PROGRAM = """
import os
import sys

import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.layout.mesh import cpu_threads

# The numbers do not depend on the machine on which the test runs.
cpu_threads.num_cores = lambda: 6
count, before, call = sys.argv[1:]
if int(count):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * int(count),
    )
exec(before)
exec(call)
print(tf.config.threading.get_intra_op_parallelism_threads())
tf.constant(0) + 1
print(len(tf.config.list_logical_devices("CPU")))
print(len(os.listdir("/proc/self/task")))
"""

LIST = "tlm.distribution.list_devices()"
ENABLE = "tlm.distribution.enable()"


def numbers(count, before="", call=LIST, **variables):
    """Returns the numbers that the program prints."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    }
    done = forked_process.run_code(
        PROGRAM,
        str(count),
        before,
        call,
        env={**environment, **variables},
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize("call", [LIST, ENABLE])
def test_logical_cpus_share_the_cores(call):
    assert numbers(2, call=call)[:2] == [3, 2]


def test_each_logical_cpu_has_at_least_one_thread():
    threads, devices, _ = numbers(8)
    assert (threads, devices) == (1, 8)


def test_emulation_splits_the_cpu():
    assert numbers(0, call="tlm.emulation.enable(num_cores=3)")[:2] == [2, 3]


def test_cpu_that_is_not_split_is_unchanged():
    assert numbers(0)[:2] == [0, 1]


def test_number_of_the_program_is_kept():
    chosen = "tf.config.threading.set_intra_op_parallelism_threads(5)"
    threads, devices, all_threads = numbers(2, chosen)
    assert (threads, devices) == (5, 2)
    # The pool of both devices has 3 threads by default, and 5 in this case.
    assert all_threads - numbers(2)[2] == 2


@pytest.mark.parametrize("name", ["TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"])
def test_number_of_the_environment_is_kept(name):
    assert numbers(2, **{name: "4"})[:2] == [0, 2]


def test_call_after_the_start_of_tensorflow_has_no_effect():
    assert numbers(2, "tf.constant(0) + 1")[:2] == [0, 2]
