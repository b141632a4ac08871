"""`connect`, which joins a cluster and checks its processes."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap import _version
from tf_layoutmap._core import checks, literals, requirements, strategies
from tf_layoutmap.ps import (
    answers,
    claims,
    datasets,
    exits,
    guard,
    lost_calls,
    messages,
    processes,
    restarts,
    waiting,
)
from tf_layoutmap.ps.processes import Process

if TYPE_CHECKING:
    from tf_layoutmap._core.types import ShardCounts

# Timeout for the descriptions of all processes, in seconds.
_ANSWER_SECONDS = 60.0
_REMEDY = (
    "Start it with `python -m tf_layoutmap.server`, of tf_layoutmap "
    f"{_version.__version__} and TensorFlow {{tensorflow}}."
)

_CALL_REMEDY = "Start missing servers and workers, and this program again."

_processes: weakref.WeakKeyDictionary[Any, list[Process]] = (
    weakref.WeakKeyDictionary()
)


def connect(
    *,
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver
    | None = None,
    partitioner: ShardCounts | None = None,
    timeout_seconds: str | float = 120.0,
    on_server_loss: literals.OnServerLoss = "raise",
    call_deadline: str | float = "10min",
) -> tf.distribute.ParameterServerStrategy:
    """Joins a cluster of servers and workers as its coordinator.

    The function waits until all servers and workers answer. The function checks
    the versions of TensorFlow and of this package in each process, and that no
    other coordinator uses the servers. If an earlier coordinator of the servers
    has ended, the memory of its tables is freed.

    ```py
    strategy = tlm.ps.connect()
    with strategy.scope():
        embedding = tlm.TPUEmbedding(features, optimizer)
    ```

    Args:
      cluster_resolver: Object that returns the addresses of the servers and
        workers, for example `SlurmClusterResolver` or
        `KubernetesClusterResolver` of `tf.distribute.cluster_resolver`. None:
        the cluster of the environment variable TF_CONFIG.
      partitioner: Partitioner of the strategy's variables; see
        `tf.distribute.ParameterServerStrategy`.
      timeout_seconds: Maximum time to wait for servers and workers, in seconds
        or as `"2min"`.
      on_server_loss: What happens if a server or worker is lost during a call
        that is not a step of a `Run` or of `fit`, for example in `build` or
        `stats`. `"raise"` raises `ServerLostError`. `"restart"` restarts this
        program, as for `tlm.ps.Run`.
      call_deadline: Maximum time that such a call waits for a server or worker
        that does not answer, before it raises `StepDeadlineError`. After a
        `Run` is created, its `step_deadline` and `on_server_loss` apply
        instead.

    Returns:
      The strategy.

    Raises:
      TypeError: If `cluster_resolver` is not a resolver of TensorFlow.
      ValueError: If the cluster has no servers or no workers, has a malformed
        address, or this process is one of its servers or workers. The error is
        also raised if `timeout_seconds` or `call_deadline` is not a duration,
        or `on_server_loss` is neither `"raise"` nor `"restart"`.
      RuntimeError: If a server or worker does not answer within
        `timeout_seconds`, was not started by `python -m tf_layoutmap.server`,
        or has other versions than this process. The error is also raised if
        another coordinator that still runs uses a server. The message says
        which process it is and how to fix the problem.
    """
    seconds = waiting.read_seconds(timeout_seconds, "timeout_seconds")
    deadline = waiting.read_seconds(call_deadline, "call_deadline")
    checks.check_one_of(
        "on_server_loss", on_server_loss, restarts.ON_SERVER_LOSS
    )
    if cluster_resolver is None:
        jobs = read_cluster(os.environ.get("TF_CONFIG"))
        remedy = ", with the same cluster in TF_CONFIG"
    else:
        jobs = resolve_cluster(cluster_resolver)
        remedy = ""
    all_processes = processes.processes_of(jobs)
    faults = processes.wait_until_all_serve(all_processes, seconds)
    if faults:
        raise RuntimeError(
            f"After {seconds:g} s: {'; '.join(faults)}. Start each server and "
            f"worker with `python -m tf_layoutmap.server`{remedy}."
        )
    all_processes = processes.with_status(all_processes)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), rpc_layer="grpc"
    )
    # TensorFlow connects without a deadline.
    answers.watch(
        [process.address for process in all_processes],
        deadline,
        num_servers=len(jobs["ps"]),
    )
    call_guard = guard.Guard(
        all_processes,
        deadline,
        lambda: (0, _CALL_REMEDY),
        restarts_program=on_server_loss == "restart",
    )
    call_guard.cover_other_calls()
    strategy = lost_calls.call(
        tf.distribute.ParameterServerStrategy,
        resolver,
        variable_partitioner=partitioner,
    )
    check_answers(processes.describe_all(all_processes, _ANSWER_SECONDS))
    claims.claim(all_processes)
    messages.shorten_log()
    _processes[strategy] = all_processes
    strategies.register_our_ops(strategy)
    datasets.patch_fit()
    return strategy


def processes_of(strategy: Any) -> list[Process] | None:
    """Returns the processes of a strategy; None if not from `connect`."""
    try:
        return _processes.get(strategy)
    except TypeError:  # Not a strategy.
        return None


def read_cluster(tf_config: str | None) -> dict[str, list[str]]:
    """Returns the addresses in TF_CONFIG by job.

    >>> read_cluster('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}}')
    {'ps': ['a:1'], 'worker': ['b:1']}

    Raises:
      ValueError: If TF_CONFIG has no servers, no workers or a malformed
        address, or describes the task of a server or worker.
    """
    try:
        config = _read_config(tf_config)
    except ValueError as error:
        raise ValueError(
            "The environment variable TF_CONFIG must have a cluster with "
            'addresses of "ps" and "worker", as `python -m '
            f"tf_layoutmap.local_cluster` sets it. {error} Received: "
            f"{tf_config!r}."
        ) from None
    task = config.get("task")
    _check_coordinator(
        task.get("type") if isinstance(task, dict) else None,
        "environment variable TF_CONFIG",
        task,
    )
    return config["cluster"]


def resolve_cluster(
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> dict[str, list[str]]:
    """Returns the addresses that a resolver finds, by job.

    Raises:
      TypeError: If `cluster_resolver` is not a resolver of TensorFlow.
      ValueError: If there are no servers, no workers or a malformed address, if
        the protocol is not gRPC, or if this process is a server or worker.
    """
    if not isinstance(
        cluster_resolver, tf.distribute.cluster_resolver.ClusterResolver
    ):
        raise TypeError(
            "Argument `cluster_resolver` must be a ClusterResolver of "
            "`tf.distribute.cluster_resolver`, or None for the cluster in "
            f"TF_CONFIG. Received: {cluster_resolver!r}."
        )
    name = type(cluster_resolver).__name__
    jobs = cluster_resolver.cluster_spec().as_dict()
    try:
        _check_jobs(jobs)
    except ValueError as error:
        raise ValueError(
            "Argument `cluster_resolver` must find the addresses of the jobs "
            f'"ps" and "worker". {error} Received: {name} with {jobs!r}.'
        ) from None
    # Some resolvers set the task only when they resolve the cluster.
    job, index = cluster_resolver.task_type, cluster_resolver.task_id
    _check_coordinator(
        job,
        f"argument `cluster_resolver` ({name})",
        {"type": job, "index": index},
    )
    if cluster_resolver.rpc_layer not in (None, "", "grpc"):
        raise ValueError(
            'Argument `cluster_resolver` must use the protocol "grpc". '
            f"Received: rpc_layer={cluster_resolver.rpc_layer!r} of {name}."
        )
    return jobs


def _check_coordinator(job: Any, source: str, task: Any):
    """Raises a ValueError if this process is a server or a worker."""
    if job in ("ps", "worker"):
        raise ValueError(
            "`connect` must be called by the coordinator, whose task in the "
            f'{source} has the type "chief" or is missing. Start servers and '
            "workers with `python -m tf_layoutmap.server` instead. Received: "
            f"{task!r}."
        )


def _read_config(tf_config: str | None) -> dict[str, Any]:
    """Parses TF_CONFIG, and checks its servers and workers."""
    try:
        config = json.loads(tf_config or "{}")
    except ValueError as error:
        raise ValueError(f"It must be JSON ({error}).") from None
    _check_jobs(config.get("cluster") if isinstance(config, dict) else None)
    return config


def _check_jobs(jobs: Any):
    """Raises a ValueError if servers, workers or their addresses are wrong."""
    jobs = processes.check_addresses(jobs)
    if missing := [job for job in ("ps", "worker") if not jobs.get(job)]:
        raise ValueError(f"Missing: {missing}.")


def check_answers(answers: Mapping[Process, Any]):
    """Checks that all processes can take part in the training.

    Args:
      answers: Result of `describe_all`.

    Raises:
      RuntimeError: If a process did not answer, does not have the package's
        ops, or has other versions than this process.
    """
    versions = {
        "tensorflow": tf.__version__,
        "tf_layoutmap": _version.__version__,
    }
    remedy = _REMEDY.format(tensorflow=tf.__version__)
    for process, answer in answers.items():
        if answer is None:
            exits.leave_cluster()
            raise RuntimeError(
                f"The process {process.name} does not answer within "
                f"{_ANSWER_SECONDS:g} s, but its port is open. Check whether "
                "it is stopped, or belongs to another program."
            )
        if isinstance(answer, tf.errors.NotFoundError):
            raise RuntimeError(
                f"The process {process.name} lacks the ops of tf_layoutmap "
                f"{_version.__version__}. {remedy}"
            ) from None
        if isinstance(answer, Exception):
            raise RuntimeError(
                f"The versions of process {process.name} are not available "
                f"({type(answer).__name__}). {remedy}"
            ) from answer
        same = (
            requirements.minor(answer.get("tensorflow", ""))
            == requirements.minor(versions["tensorflow"])
            and answer.get("tf_layoutmap") == versions["tf_layoutmap"]
        )
        if not same:
            raise RuntimeError(
                f"The process {process.name} has TensorFlow "
                f"{answer.get('tensorflow')} and tf_layoutmap "
                f"{answer.get('tf_layoutmap')}. {remedy}"
            )
