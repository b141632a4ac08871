"""Replicas of a strategy: index of the caller, and inputs of each replica.

`merge_replica_steps` calls a function once with the batches of all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import strategies
from tf_layoutmap.embedding import backend, inputs
from tf_layoutmap.embedding.inputs import FeatureIds

_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


class Replicas:
    """The replicas of the strategy under which an embedding was created.

    Attributes:
      strategy: The strategy.
      num_replicas: Number of replicas of the strategy.
      has_processes: Whether replicas in other processes participate in a step.
      is_on_servers: Whether the tables are on parameter servers.
    """

    def __init__(self):
        """Stores the strategy in scope.

        Raises:
          NotImplementedError: If the strategy is not supported.
        """
        self.strategy = tf.distribute.get_strategy()
        self._is_default = not tf.distribute.has_strategy()
        _check_supported(self.strategy, self._is_default)
        strategies.warn_of_wrong_sums(self.strategy)
        self.num_replicas = self.strategy.num_replicas_in_sync
        self.has_processes = isinstance(
            self.strategy, tf.distribute.MultiWorkerMirroredStrategy
        )
        self.is_on_servers = not self._is_default and strategies.on_servers(
            self.strategy
        )

    @property
    def is_first_process(self) -> bool:
        """Whether the first replica runs in this process."""
        resolver = self.strategy.cluster_resolver
        if not self.has_processes or resolver is None:
            return True
        jobs = resolver.cluster_spec().jobs
        return resolver.task_id in (0, None) and (
            resolver.task_type == "chief" or "chief" not in jobs
        )

    def handled_by(self, replica: int) -> list[int]:
        """Returns the replicas whose steps `replica` runs in this process.

        The engine of a process runs the steps of all replicas. The calls of the
        first replica of a process run the steps of this replica and of all
        replicas in other processes, in the order of the replicas. The calls of
        all other replicas run only their own steps.
        """
        num_local = len(self.strategy.extended.worker_devices)
        first = replica - replica % num_local
        if replica != first:
            return [replica]
        local = range(first + 1, first + num_local)
        return [
            other for other in range(self.num_replicas) if other not in local
        ]

    @property
    def num_local(self) -> int:
        """Number of replicas in this process."""
        if self.num_replicas == 1:
            return 1
        return len(self.strategy.extended.worker_devices)

    def is_first_here(self, replica: int) -> bool:
        """Whether `replica` is the first replica of this process."""
        return replica % self.num_local == 0

    def is_last_here(self, replica: int) -> bool:
        """Whether `replica` is the last replica of this process."""
        return replica % self.num_local == self.num_local - 1

    def current(self) -> int | None:
        """Returns the calling replica's index, or None outside `strategy.run`.

        Raises:
          RuntimeError: If the caller is a replica of another strategy.
        """
        if self.is_on_servers:
            return 0
        if strategies.on_servers():
            raise RuntimeError(
                "A TPUEmbedding must be created in `strategy.scope()` of the "
                "ParameterServerStrategy, so that its tables are on the "
                "servers. Its engine is in the process that created it, where "
                "steps that a ClusterCoordinator schedules on workers have no "
                "access to it. Received: a step in the scope of "
                f"{type(tf.distribute.get_strategy()).__name__}."
            )
        context = tf.distribute.get_replica_context()
        if context is None:
            return None
        if self.has_processes and tf.executing_eagerly():
            raise RuntimeError(
                "Under MultiWorkerMirroredStrategy, TPUEmbedding must be used "
                "in a tf.function: the processes exchange ids and gradients "
                "by operations that do not run eagerly."
            )
        if context.strategy is self.strategy:
            # While a function is traced, the index is a constant tensor. A TPU
            # program is traced once for all replicas, as if by the first one.
            index = tf.get_static_value(context.replica_id_in_sync_group)
            return 0 if index is None else int(index)
        if context.num_replicas_in_sync > 1:
            raise RuntimeError(
                "TPUEmbedding must be used in replicas of the strategy under "
                f"which it was created, {type(self.strategy).__name__}; create "
                "it in `strategy.scope()`. Received: a call from a replica of "
                f"{type(context.strategy).__name__}."
            )
        return None

    def require_current(self, method: str) -> int:
        """Returns the calling replica's index, or 0 if there is one replica.

        Raises:
          RuntimeError: If there are several replicas, and the caller is not one
            of these replicas.
        """
        replica = self.current()
        if replica is not None:
            return replica
        if self.num_replicas == 1:
            return 0
        raise RuntimeError(
            f"`{method}` must be called inside `strategy.run`, once by each "
            f"of the {self.num_replicas} replicas."
        )

    def of_device(self, device: str) -> int:
        """Returns the index of the replica on a device.

        Raises:
          ValueError: If `device` is not a device of the strategy.
        """
        if self.is_on_servers:
            raise ValueError(
                "Argument `device` must be None under "
                "ParameterServerStrategy, where a step belongs to the worker "
                f"that runs it. Received: device={device!r}."
            )
        if self.has_processes:
            raise ValueError(
                "Argument `device` must be None under "
                "MultiWorkerMirroredStrategy, where all processes enqueue a "
                f"step together. Received: device={device!r}."
            )
        # The default strategy does not have a list of devices. Its steps run on
        # the host.
        devices = (
            (_HOST,)
            if self._is_default
            else (self.strategy.extended.worker_devices)
        )
        # Each core of an emulated TPU has a TPU name and a CPU name. Only the
        # `extended` object of an emulated TPUStrategy has this method.
        tpu_name_of = getattr(self.strategy.extended, "tpu_name_of", str)
        wanted = tf.DeviceSpec.from_string(tpu_name_of(device))
        replicas = [
            replica
            for replica, name in enumerate(devices)
            if _matches(wanted, tf.DeviceSpec.from_string(tpu_name_of(name)))
        ]
        if len(replicas) != 1:
            raise ValueError(
                "Argument `device` must name one device of the strategy, "
                f"which has {tuple(devices)}. Received: device={device!r}."
            )
        return replicas[0]

    def split(self, values: Any | None, argument: str) -> list[Any]:
        """Splits a structure of distributed values into one part per replica.

        Args:
          values: Structure of distributed values, or None.
          argument: Name of the argument, for the message.

        Returns:
          A list with one structure per replica, or one None per replica.

        Raises:
          ValueError: If a leaf does not contain one value per replica.
        """
        if values is None:
            return [None] * self.num_replicas
        leaves = [
            self._local_values(path, leaf, argument)
            for path, leaf in inputs.flatten_with_paths(values)
        ]
        return [
            tf.nest.pack_sequence_as(values, [leaf[i] for leaf in leaves])
            for i in range(self.num_replicas)
        ]

    def _local_values(self, path: str, leaf: Any, argument: str):
        if leaf is None:
            return [None] * self.num_replicas
        parts = self.strategy.experimental_local_results(leaf)
        if len(parts) != self.num_replicas:
            raise ValueError(
                f"Outside `strategy.run`, argument `{argument}` must hold one "
                f"value for each of the {self.num_replicas} replicas "
                "(tf.distribute.DistributedValues), or `device` must select "
                f"one replica. Received: {type(leaf)} at path {path!r}."
            )
        return parts


def _matches(wanted: tf.DeviceSpec, device: tf.DeviceSpec) -> bool:
    """Whether `device` has all properties that `wanted` specifies."""
    return all(
        getattr(wanted, part) in (None, getattr(device, part))
        for part in ("job", "replica", "task", "device_type", "device_index")
    )


def _check_supported(strategy: tf.distribute.Strategy, is_default: bool):
    if (
        not is_default
        and not isinstance(
            strategy,
            (
                tf.distribute.OneDeviceStrategy,
                tf.distribute.MirroredStrategy,
                tf.distribute.MultiWorkerMirroredStrategy,
            ),
        )
        and not backend.is_tpu_strategy(strategy)
        and (not strategies.on_servers(strategy))
    ):
        raise NotImplementedError(
            "TPUEmbedding supports the default strategy, OneDeviceStrategy, "
            "MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy and "
            "ParameterServerStrategy. Received: "
            f"{type(strategy).__name__}."
        )


def values_of(strategy: tf.distribute.Strategy, value: Any) -> tuple[Any, ...]:
    """Returns the value of each replica of this process, in a merge call.

    If all replicas pass the same tensor, TensorFlow passes it only once.

    Args:
      strategy: Strategy of the replicas.
      value: An argument of the function that `merge_call` calls.
    """
    values = strategy.experimental_local_results(value)
    count = len(strategy.extended.worker_devices)
    return values * count if len(values) == 1 else values


# Names of the attributes of `FeatureIds` that are tensors.
_TENSORS = ("ids", "splits", "num_samples", "weights")
# Names of the attributes that are tensors only in some batches. The kind of
# keys is a tensor only if the batch was packed.
_OPTIONAL_TENSORS = ("kind", "strings", "string_keys")


def merge_replica_steps(
    strategy: tf.distribute.Strategy,
    features: Sequence[FeatureIds],
    work: Callable[[list[list[FeatureIds]], Any], Any],
    argument: Any,
) -> None:
    """Calls `work` once with the batches of all replicas.

    Each replica calls this function with its batch.

    Args:
      strategy: Strategy of the replicas.
      features: Batch of the calling replica.
      work: Function that takes a list with the batch of each replica, and
        `argument`.
      argument: A bool or a bool tensor, which is equal in all replicas.

    Raises:
      RuntimeError: If the call is in a tf.function or a condition inside the
        function that is passed to `strategy.run`. TensorFlow does not support
        merge calls in nested functions and conditions.
    """
    parts_of = [
        [
            *_TENSORS,
            *(
                part
                for part in _OPTIONAL_TENSORS
                if tf.is_tensor(getattr(feature, part))
            ),
        ]
        for feature in features
    ]
    tensors = [
        [tf.convert_to_tensor(getattr(feature, part)) for part in parts]
        for feature, parts in zip(features, parts_of)
    ]

    def work_on_all(_, tensors, argument):
        # For each tensor, a list of its values in the order of the replicas.
        by_replica = [
            values_of(strategy, leaf) for leaf in tf.nest.flatten(tensors)
        ]
        arguments = strategy.experimental_local_results(argument)
        batches = []
        for replica in range(strategy.num_replicas_in_sync):
            values = tf.nest.pack_sequence_as(
                tensors, [leaf[replica] for leaf in by_replica]
            )
            batches.append(
                [
                    dataclasses.replace(feature, **dict(zip(parts, value)))
                    for feature, parts, value in zip(features, parts_of, values)
                ]
            )
        work(batches, arguments[0])

    tf.distribute.get_replica_context().merge_call(
        work_on_all, args=(tensors, tf.convert_to_tensor(argument, tf.bool))
    )
