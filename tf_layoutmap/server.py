"""Starts a TensorFlow server that has the ops of this package.

    python -m tf_layoutmap.server --cluster='{"ps": ["host:2222"], ...}' \\
        --job_name=ps --task_index=0

A TensorFlow server can run an op only if the library of the op is loaded in the
server's process, and no other process can load the library in that process.
Therefore, start parameter servers and workers with this module, which loads the
library.

Security: TensorFlow's server listens on all network interfaces, even if its
address is 127.0.0.1, and connections are not authenticated. Every client that
reaches the port can read and write the tables and files of this process, and
run operations in this process. Restrict access with a firewall or a private
network.

By default, TensorFlow logs only errors. Set TF_CPP_MIN_LOG_LEVEL=0 for the full
log.
"""

import json
import os
import sys

from absl import app, flags

if __name__ == "__main__":
    # The variable is set before TensorFlow is imported, because TensorFlow
    # reads it once. Level 2 hides messages below the error level, for example
    # lists of devices and messages about calls that a coordinator has
    # cancelled.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# This import loads the op library before the server starts. If TensorFlow is
# not installed, the import raises an error that contains an install command.
from tf_layoutmap._core import ops  # noqa: F401

import tensorflow as tf  # isort: skip

from tf_layoutmap.ps import processes  # isort: skip

_LEAST_THREADS = 8
_NUM_THREADS = "TF_NUM_INTEROP_THREADS"

_CLUSTER = flags.DEFINE_string(
    "cluster",
    None,
    "Addresses of all processes as JSON: {job: [host:port]}. "
    "Default: `cluster` of TF_CONFIG.",
)
_JOB_NAME = flags.DEFINE_string(
    "job_name", None, "Job of this process. Default: the job in TF_CONFIG."
)
_TASK_INDEX = flags.DEFINE_integer(
    "task_index",
    None,
    "Index of this process in its job. Default: the index in TF_CONFIG.",
    lower_bound=0,
)


def read_task(
    cluster: str | None,
    job_name: str | None,
    task_index: int | None,
    tf_config: str | None,
) -> tuple[dict[str, list[str]], str, int]:
    """Returns the addresses of the cluster, and job and index of this process.

    >>> read_task('{"ps": ["a:1", "b:1"]}', "ps", 1, None)
    ({'ps': ['a:1', 'b:1']}, 'ps', 1)

    Args:
      cluster: `{job: [address, ...]}` as JSON. None: the cluster in
        `tf_config`.
      job_name: Job of this process. None: the job in `tf_config`.
      task_index: Index of this process. None: the index in `tf_config`.
      tf_config: Value of the environment variable TF_CONFIG, as JSON. None: the
        variable is not set.

    Raises:
      ValueError: If a value is missing, is not valid JSON, or is not in the
        cluster.
    """
    config = _read_json("TF_CONFIG", tf_config) if tf_config else {}
    task = config.get("task", {})
    if not isinstance(task, dict):
        raise ValueError(
            'TF_CONFIG must have a task like {"type": "ps", "index": 0}. '
            f"Received: {task!r}."
        )
    jobs = _read_json("cluster", cluster) if cluster else config.get("cluster")
    job_name = task.get("type") if job_name is None else job_name
    task_index = task.get("index") if task_index is None else task_index
    try:
        jobs = processes.check_addresses(jobs)
    except ValueError as error:
        raise ValueError(
            "Flag `--cluster` (or TF_CONFIG) must be {job: [address, ...]}. "
            f"{error}"
        ) from None
    if not isinstance(job_name, str) or job_name not in jobs:
        raise ValueError(
            f"Flag `--job_name` must be one of {sorted(jobs)}. Received: "
            f"{job_name!r}."
        )
    size = len(jobs[job_name])
    if (
        not isinstance(task_index, int)
        or isinstance(task_index, bool)
        or not 0 <= task_index < size
    ):
        raise ValueError(
            f"Flag `--task_index` must be from 0 to {size - 1} for job "
            f"{job_name!r}. Received: {task_index!r}."
        )
    return jobs, job_name, task_index


def num_threads(
    num_cores: int, num_workers: int, asked: str | None = None
) -> int:
    """Returns the number of threads that run operations of a server.

    When another process calls a function on this server, the function occupies
    a thread until it returns. The function may wait for other calls that also
    require a thread of this server. TensorFlow's default is one thread per
    core, so two such functions can deadlock on a machine with two cores.
    Examples of such functions are the training step of a worker, cancelled
    functions that have not returned, and reads and writes of variables.

    >>> num_threads(num_cores=2, num_workers=2)
    8

    Args:
      num_cores: Number of cores of this machine.
      num_workers: Number of workers. A server may wait for each worker.
      asked: Value of the environment variable TF_NUM_INTEROP_THREADS. None: the
        variable is not set.

    Returns:
      The number of threads. 0 if TensorFlow reads the number from the
      environment.
    """
    if asked:
        return 0
    return max(_LEAST_THREADS, num_cores, num_workers + 1)


def session_config(inter_op_threads: int) -> tf.compat.v1.ConfigProto:
    """Returns the options of a server.

    By default, a thread without work searches for work for a while before it
    sleeps. The threads of a server wait for messages several times in each
    step, and the search takes about 5 % of the processor time of a step.

    Args:
      inter_op_threads: Number of threads that run operations; 0 for the number
        in the environment.
    """
    return tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=inter_op_threads,
        experimental=tf.compat.v1.ConfigProto.Experimental(
            disable_thread_spinning=True
        ),
    )


def _read_json(name: str, text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must be JSON. Received: {text!r} ({error})."
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` must be a JSON object. Received: {text!r}.")
    return value


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(
            f"All arguments must be flags. Received: {argv[1:]}."
        )
    try:
        jobs, job_name, task_index = read_task(
            _CLUSTER.value,
            _JOB_NAME.value,
            _TASK_INDEX.value,
            os.environ.get("TF_CONFIG"),
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    server = tf.distribute.Server(
        tf.train.ClusterSpec(jobs),
        job_name=job_name,
        task_index=task_index,
        protocol="grpc",
        start=True,
        config=session_config(
            num_threads(
                len(os.sched_getaffinity(0)),
                len(jobs.get("worker", ())),
                os.environ.get(_NUM_THREADS),
            )
        ),
    )
    print(f"{job_name}:{task_index} serves {server.target}", flush=True)
    port = jobs[job_name][task_index].rpartition(":")[2]
    print(
        f"Port {port} is open on all network interfaces, without "
        "authentication: restrict access with a firewall or a private "
        "network.",
        file=sys.stderr,
        flush=True,
    )
    server.join()


if __name__ == "__main__":
    # With this setting, a worker waits for parameter servers that start after
    # the worker.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    app.run(main)
