"""Creates the configuration proto with which a TPU is initialized.

`create_config` returns the proto, which describes tables, features and
optimizers. TensorFlow's `optimization_parameters.proto` defines the fields of
an optimizer. Hyperparameters are written to these fields unchanged. `Cores`
describes the hosts and cores of a `TPUStrategy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.tpu import tpu_embedding_configuration_pb2

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.configs import config, optimizer_specs

# Values of the proto enum `GradientAccumulationStatus`.
_ENABLED, _DISABLED = 1, 2


@dataclasses.dataclass(frozen=True)
class Rule:
    """The ops, slot variables and proto fields of one optimizer on a TPU.

    Attributes:
      op_name: Name of the optimizer in its load and retrieve operations.
      slots: Names of the slot variables, in the order in which these operations
        take them.
      write: Function that writes the proto fields that only this optimizer has.
    """

    op_name: str
    slots: tuple[str, ...]
    write: Callable[[Any, Any], None]

    @property
    def load(self) -> Callable[..., Any]:
        """Operation that sends a shard to the TPU."""
        return getattr(tf.raw_ops, f"LoadTPUEmbedding{self.op_name}Parameters")

    @property
    def retrieve(self) -> Callable[..., Any]:
        """Operation that retrieves a shard from the TPU."""
        return getattr(
            tf.raw_ops, f"RetrieveTPUEmbedding{self.op_name}Parameters"
        )


def rule_of(optimizer: Any) -> Rule:
    """Returns the rule of an optimizer that has passed `read_optimizer`."""
    return _RULES[type(optimizer).__name__]


def write_parameters(
    parameters: Any,
    optimizer: Any,
    learning_rates: list[Callable[[], Any]],
):
    """Writes one optimizer into an `OptimizationParameters` proto.

    Args:
      parameters: An empty proto.
      optimizer: An optimizer of `tf.tpu.experimental.embedding`.
      learning_rates: The dynamic learning rates. In the proto, the tag of a
        learning rate is its index in this list.
    """
    rate = optimizer.learning_rate
    if callable(rate):
        parameters.learning_rate.dynamic.tag = learning_rates.index(rate)
    else:
        parameters.learning_rate.constant = rate
    parameters.gradient_accumulation_status = (
        _ENABLED if optimizer.use_gradient_accumulation else _DISABLED
    )
    _write_limits(
        parameters,
        "clipping_limits",
        optimizer.clip_weight_min,
        optimizer.clip_weight_max,
    )
    _write_limits(
        parameters,
        "gradient_clipping_limits",
        optimizer.clip_gradient_min,
        optimizer.clip_gradient_max,
    )
    if optimizer.weight_decay_factor:
        parameters.weight_decay_factor = optimizer.weight_decay_factor
        if optimizer.multiply_weight_decay_factor_by_learning_rate:
            parameters.multiply_weight_decay_factor_by_learning_rate = True
    # The attribute of the optimizer is a bool, and the proto field is an enum
    # with the values 0 and 1. The bool is converted to an int, because protobuf
    # 7.34 does not accept a bool for an enum.
    parameters.low_dimensional_packing_status = int(
        bool(optimizer.low_dimensional_packing_status)
    )
    rule_of(optimizer).write(parameters, optimizer)


def write_quantization(parameters: Any, quantization: Any):
    """Writes a `QuantizationConfig` into an `OptimizationParameters`."""
    proto = parameters.simulated_quantization
    proto.enabled = True
    proto.num_buckets = quantization.num_buckets
    proto.clipping_limits.lower.value = quantization.lower
    proto.clipping_limits.upper.value = quantization.upper


def _write_limits(parameters, field: str, lower, upper):
    # If a limit is None, the field must remain unset.
    if lower is not None:
        getattr(parameters, field).lower.value = lower
    if upper is not None:
        getattr(parameters, field).upper.value = upper


def _write_sgd(parameters, optimizer):
    del optimizer
    parameters.stochastic_gradient_descent.SetInParent()


def _write_adagrad(parameters, optimizer):
    del optimizer
    parameters.adagrad.SetInParent()


def _write_adagrad_momentum(parameters, optimizer):
    proto = parameters.adagrad_momentum
    proto.momentum = optimizer.momentum
    proto.use_nesterov = optimizer.use_nesterov
    proto.exponent = optimizer.exponent
    proto.beta2 = optimizer.beta2
    proto.epsilon = optimizer.epsilon


def _write_adam(parameters, optimizer):
    proto = parameters.adam
    proto.beta1 = optimizer.beta_1
    proto.beta2 = optimizer.beta_2
    proto.epsilon = optimizer.epsilon
    proto.use_non_lazy_adam = not optimizer.lazy_adam
    proto.use_sum_inside_sqrt = optimizer.sum_inside_sqrt


def _write_ftrl(parameters, optimizer):
    proto = parameters.ftrl
    proto.l1 = optimizer.l1_regularization_strength
    proto.l2 = optimizer.l2_regularization_strength
    proto.lr_power = optimizer.learning_rate_power
    proto.beta = optimizer.beta
    proto.multiply_linear_by_lr = optimizer.multiply_linear_by_learning_rate
    proto.allow_zero_accumulator = optimizer.allow_zero_accumulator


_RULES = {
    "SGD": Rule("StochasticGradientDescent", (), _write_sgd),
    "Adagrad": Rule("Adagrad", ("accumulators",), _write_adagrad),
    "AdagradMomentum": Rule(
        "AdagradMomentum", ("accumulators", "momenta"), _write_adagrad_momentum
    ),
    "Adam": Rule("ADAM", ("momenta", "velocities"), _write_adam),
    "FTRL": Rule("FTRL", ("accumulators", "linears"), _write_ftrl),
}


# Maximum number of rows of a table. The TPU embedding operations store ids in
# 32 bits.
MAX_NUM_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TPUSpec:
    """The parts of a feature config with which a TPU is configured.

    Attributes:
      spec: Tables and features.
      optimizers: The optimizer object of each table.
      feature_names: `FeatureConfig.name` of each feature, or None if it is not
        set.
      quantizations: `TableConfig.quantization_config` of each table.
      learning_rates: The distinct dynamic learning rates, in the order in which
        the tables use them.
    """

    spec: config.EmbeddingSpec
    optimizers: tuple[Any, ...]
    feature_names: tuple[str | None, ...]
    quantizations: tuple[Any, ...]
    learning_rates: list[Callable[[], Any]]


def read_spec(
    spec: config.EmbeddingSpec,
    feature_configs: Sequence[Any],
    table_configs: Sequence[Any],
    optimizer: Any,
) -> TPUSpec:
    """Collects values that a TPU requires and that `spec` does not contain.

    Args:
      spec: Tables and features.
      feature_configs: The `FeatureConfig`s in the order of the spec.
      table_configs: The `TableConfig`s in the order of the spec.
      optimizer: Default optimizer of tables.

    Raises:
      ValueError: If a table has no optimizer that a TPU supports, or has more
        rows than a 32-bit id can represent.
    """
    optimizers = [
        optimizer if table_config.optimizer is None else table_config.optimizer
        for table_config in table_configs
    ]
    learning_rates: list[Callable[[], Any]] = []
    for table, table_optimizer in zip(spec.tables, optimizers):
        if table_optimizer is None:
            raise ValueError(
                f"{type(None)} is an unsupported optimizer class; under "
                "TPUStrategy every table requires an optimizer of "
                f"tf.tpu.experimental.embedding (table {table.name!r})."
            )
        if isinstance(table_optimizer, optimizer_specs.HostOptimizer):
            raise ValueError(
                f"{type(table_optimizer).__name__} is an optimizer of the host "
                "engine, which a TPU does not support. Under TPUStrategy, use "
                "an optimizer of tf.tpu.experimental.embedding, or pass "
                f'engine="host" (table {table.name!r}).'
            )
        if table.num_rows > MAX_NUM_ROWS:
            raise ValueError(
                "A TPU stores ids in 32 bits, so a table must have at most "
                f"{MAX_NUM_ROWS} rows. Received: "
                f"{table.num_rows} (table {table.name!r})."
            )
        rate = table_optimizer.learning_rate
        if callable(rate) and rate not in learning_rates:
            learning_rates.append(rate)
    return TPUSpec(
        spec,
        tuple(optimizers),
        tuple(feature.name for feature in feature_configs),
        tuple(table.quantization_config for table in table_configs),
        learning_rates,
    )


def create_config(
    tpu: TPUSpec,
    output_shapes: Sequence[Sequence[int]],
    *,
    num_hosts: int,
    num_replicas: int,
    num_cores_per_replica: int | None,
    is_pipelined: bool,
) -> tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration:  # pyright: ignore[reportAttributeAccessIssue] Created at import time.
    """Returns the configuration proto.

    Args:
      tpu: Tables, features and optimizers.
      output_shapes: Shape of each feature's activations, without `dim`.
      num_hosts: Number of hosts over which the tables are sharded.
      num_replicas: Number of replicas of the strategy.
      num_cores_per_replica: Number of cores of an SPMD replica, or None without
        SPMD.
      is_pipelined: Whether the lookup of a step overlaps with the previous
        step.
    """
    proto = tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration()  # pyright: ignore[reportAttributeAccessIssue] Created at import time.
    for index, table in enumerate(tpu.spec.tables):
        descriptor = proto.table_descriptor.add()
        descriptor.name = table.name
        # Each host must have at least one row.
        descriptor.vocabulary_size = max(table.num_rows, num_hosts)
        descriptor.dimension = table.dim
        parameters = descriptor.optimization_parameters
        write_parameters(parameters, tpu.optimizers[index], tpu.learning_rates)
        if tpu.quantizations[index]:
            write_quantization(parameters, tpu.quantizations[index])
    for feature, name, shape in zip(
        tpu.spec.features, tpu.feature_names, output_shapes
    ):
        descriptor = proto.feature_descriptor.add()
        if name:
            descriptor.name = name
        descriptor.table_id = feature.table
        descriptor.input_shape.extend(shape)
    # `enqueue` sets the mode of each batch.
    proto.mode = proto.TRAINING
    proto.num_hosts = num_hosts
    proto.num_tensor_cores = num_replicas * (num_cores_per_replica or 1)
    proto.sharding_strategy = proto.DIV_DEFAULT
    proto.pipeline_execution_with_tensor_core = is_pipelined
    if num_cores_per_replica:
        proto.spmd_sharding.enabled = True
        proto.spmd_sharding.num_cores_per_replica = num_cores_per_replica
    return proto


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a TPU.

    Attributes:
      device: Device name, such as
        `"/job:worker/replica:0/task:0/device:TPU:1"`.
      ordinal: Index of the core on its host.
      host: The CPU device of the core's host.
    """

    device: str
    ordinal: int
    host: str


def num_cores_per_replica(strategy: tf.distribute.Strategy) -> int | None:
    """Returns the cores of a replica, or None without a device assignment."""
    assignment = getattr(strategy.extended, "_device_assignment", None)
    return assignment.num_cores_per_replica if assignment else None


class Cores:
    """The hosts and cores on which the replicas of a TPUStrategy run.

    Attributes:
      hosts: The CPU device of each host, in the order of the shards of a table.
      num_replicas: Number of replicas of the strategy.
      num_cores_per_replica: Number of cores of an SPMD replica, or None without
        a device assignment.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Reads the devices of the strategy.

        Raises:
          RuntimeError: If the devices of the strategy are not on exactly
            `num_hosts` hosts.
        """
        extended = strategy.extended
        self.num_replicas = strategy.num_replicas_in_sync
        self.num_cores_per_replica = num_cores_per_replica(strategy)
        self.num_hosts = extended.num_hosts
        self._of_replicas = [
            [core_of(device) for device in devices]
            for devices in _devices_of_replicas(
                extended, self.num_cores_per_replica
            )
        ]
        self.hosts = _hosts_of(extended.worker_devices)
        # Each core of an emulated TPU has a TPU name and a CPU name. Only the
        # `extended` object of an emulated TPUStrategy has this method.
        self._tpu_name_of = getattr(extended, "tpu_name_of", None)
        if len(self.hosts) != self.num_hosts:
            raise RuntimeError(
                f"The strategy must have devices on each of its "
                f"{self.num_hosts} hosts. Received: hosts {self.hosts}."
            )

    def of_replica(self, replica: int) -> list[Core]:
        """Returns the cores of one replica, in the order of the samples."""
        return self._of_replicas[replica]

    def by_name(self, device: str) -> Core:
        """Returns the core with the device name `device`.

        Raises:
          ValueError: If `device` is not a TPU core.
        """
        if self._tpu_name_of is not None:
            device = self._tpu_name_of(device)
        if tf.DeviceSpec.from_string(device).device_type != "TPU":
            raise ValueError(
                "Argument `device` of `enqueue` must be the name of a TPU "
                "core under TPUStrategy, such as '/task:0/device:TPU:2'. "
                f"Received: Non-TPU device {device!r}."
            )
        return core_of(device)


def core_of(device: str) -> Core:
    """Returns the core with the given device name."""
    return Core(
        device, tf.DeviceSpec.from_string(device).device_index, _host_of(device)
    )


def _devices_of_replicas(extended: Any, num_cores: int | None):
    if num_cores is None:
        return [[device] for device in extended.worker_devices]
    # This private attribute is required because `worker_devices` contains only
    # the first core of each replica.
    return extended._tpu_devices.tolist()


def _host_of(device: str) -> str:
    # Each call reads the function from its module, because the emulation
    # replaces the function in the module.
    return tf_private.device_util.get_host_for_device(device)


def _hosts_of(devices: Sequence[str]) -> list[str]:
    def place(device: str):
        spec = tf.DeviceSpec.from_string(device)
        return spec.replica or 0, spec.task or 0, spec.device_index or 0

    hosts = [_host_of(device) for device in sorted(devices, key=place)]
    return list(dict.fromkeys(hosts))
