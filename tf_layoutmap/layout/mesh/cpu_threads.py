"""The number of threads that an operation uses if the CPU is split.

All logical CPUs of a process share one pool of intra-op threads. By default,
the pool has one thread per core, so the operations of each logical CPU are
divided among all cores, although the other logical CPUs run the same operations
at the same time. Small operations then take longer, because threads wait for
each other (`docs/benchmarks.md`).
"""

import os

import tensorflow as tf

# TensorFlow, or a library that it uses, reads the number of threads from these
# environment variables.
_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def share_cores() -> None:
    """Sets the number of intra-op threads to the cores per logical CPU.

    The function has no effect if the CPU is not split, if the program or the
    environment sets a number of threads, or if TensorFlow has already started.
    """
    if any(os.environ.get(name) for name in _VARIABLES):
        return
    if tf.config.threading.get_intra_op_parallelism_threads() != 0:
        return
    cpus = tf.config.list_physical_devices("CPU")
    logical = cpus and tf.config.get_logical_device_configuration(cpus[0])
    if not logical or len(logical) < 2:
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(
            max(1, num_cores() // len(logical))
        )
    except RuntimeError:
        pass  # TensorFlow has already started.


def num_cores() -> int:
    """Returns the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
