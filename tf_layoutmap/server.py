"""A process of a TensorFlow cluster that knows the ops of this package.

    python -m tf_layoutmap.server --cluster='{"ps": ["host:2222"], ...}' \\
        --job_name=ps --task_index=0

TensorFlow's own server cannot run an op that its process has not loaded, and
there is no call to load it from elsewhere. Start parameter servers and workers
with this module, and it is there.

Security: TensorFlow's server listens on all network interfaces, whatever host
its address names, 127.0.0.1 too, and has no authentication: every client that
reaches the port can read and write the tables and files of this process, and
run operations in it. Restrict access by a firewall or a private network.

TensorFlow logs errors only here; set TF_CPP_MIN_LOG_LEVEL=0 for all that it
has to say.
"""

import json
import os
import sys

from absl import app, flags

if __name__ == "__main__":
    # TensorFlow reads it once. What it logs below errors is of no use to those
    # who train: device lists, and each call that a coordinator has cancelled.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Loads the op library before the server starts; says so without TensorFlow.
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
    "job_name", None, "Which job this is. Default: that of TF_CONFIG."
)
_TASK_INDEX = flags.DEFINE_integer(
    "task_index",
    None,
    "Which of the job's processes this is. Default: that of TF_CONFIG.",
    lower_bound=0,
)


def read_task(
    cluster: str | None,
    job_name: str | None,
    task_index: int | None,
    tf_config: str | None,
) -> tuple[dict[str, list[str]], str, int]:
    """Returns the cluster and which of its processes this is.

    >>> read_task('{"ps": ["a:1", "b:1"]}', "ps", 1, None)
    ({'ps': ['a:1', 'b:1']}, 'ps', 1)

    Args:
      cluster: JSON, `{job: [address, ...]}`; None for that of `tf_config`.
      job_name: None for that of `tf_config`.
      task_index: None for that of `tf_config`.
      tf_config: The environment variable TF_CONFIG, JSON; None if unset.

    Raises:
      ValueError: Something is missing, is no JSON, or is not in the cluster.
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
    """Returns how many threads of a server take calls and run operations.

    A function that another process calls holds one of them until it has ended,
    and what it waits for may need one to arrive here: with as many threads as
    cores, as is TensorFlow's default, two functions at once stop each other on
    a machine of two cores. One is what a worker trains, others are cancelled
    and not through yet, or read and write variables.

    >>> num_threads(num_cores=2, num_workers=2)
    8

    Args:
      num_cores: Of this machine.
      num_workers: Of the cluster; a server may wait for each of them.
      asked: The environment variable by which TensorFlow is told how many.

    Returns:
      How many; 0 where TensorFlow is told.
    """
    if asked:
        return 0
    return max(_LEAST_THREADS, num_cores, num_workers + 1)


def _read_json(name: str, text: str) -> dict:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must be JSON. Received: {text!r} ({error})."
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"`{name}` must be a JSON object. Received: {text!r}.")
    return found


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Flags only. Received: {argv[1:]}.")
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
        config=tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=num_threads(
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
        "authentication: keep others out by a firewall or a private "
        "network.",
        file=sys.stderr,
        flush=True,
    )
    server.join()


if __name__ == "__main__":
    # A worker must wait for parameter servers that start later than it.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    app.run(main)
