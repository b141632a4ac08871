"""Writes the configuration that a TPU is initialized with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.core.protobuf.tpu import tpu_embedding_configuration_pb2

from tf_layoutmap.embedding.spec import config, host_optimizer
from tf_layoutmap.embedding.tpu import optimizer_protos

# The embedding operations hold ids in 32 bits.
MAX_NUM_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TPUSpec:
    """What a feature config says to a TPU.

    Attributes:
      spec: Tables and features.
      optimizers: The optimizer object of each table.
      feature_names: `FeatureConfig.name` of each feature, None where unset.
      quantizations: `TableConfig.quantization_config` of each table.
      learning_rates: The dynamic ones, each once, in the order of the tables.
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
    """Collects what the frozen specs leave out.

    Args:
      spec: Tables and features.
      feature_configs: The `FeatureConfig`s in the order of the spec.
      table_configs: The `TableConfig`s in the order of the spec.
      optimizer: That of tables that bring none.

    Raises:
      ValueError: If a table has no optimizer or more rows than an id can
        name.
    """
    optimizers = [
        optimizer if one.optimizer is None else one.optimizer
        for one in table_configs
    ]
    learning_rates: list[Callable[[], Any]] = []
    for table, one in zip(spec.tables, optimizers):
        if one is None:
            raise ValueError(
                f"{type(None)} is an unsupported optimizer class; under "
                "TPUStrategy every table needs an optimizer of "
                f"tf.tpu.experimental.embedding (table {table.name!r})."
            )
        if isinstance(one, host_optimizer.HostOptimizer):
            raise ValueError(
                f"{type(one).__name__} is an optimizer of the host engine; a "
                "TPU has no such rule. Under TPUStrategy use one of "
                f"tf.tpu.experimental.embedding (table {table.name!r})."
            )
        if table.num_rows > MAX_NUM_ROWS:
            raise ValueError(
                "A TPU holds ids in 32 bits, so a table must have at most "
                f"{MAX_NUM_ROWS} rows. Received: "
                f"{table.num_rows} (table {table.name!r})."
            )
        rate = one.learning_rate
        if callable(rate) and rate not in learning_rates:
            learning_rates.append(rate)
    return TPUSpec(
        spec,
        tuple(optimizers),
        tuple(one.name for one in feature_configs),
        tuple(one.quantization_config for one in table_configs),
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
) -> tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration:  # pyright: ignore[reportAttributeAccessIssue] Made when it is imported.
    """Returns the configuration proto.

    Args:
      tpu: Tables, features and optimizers.
      output_shapes: Of each feature's activations, without `dim`.
      num_hosts: Hosts the tables are divided over.
      num_replicas: Replicas of the strategy.
      num_cores_per_replica: Cores of an SPMD replica; None without SPMD.
      is_pipelined: Whether lookups overlap with the step before.
    """
    found = tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration()  # pyright: ignore[reportAttributeAccessIssue] Made when it is imported.
    for index, table in enumerate(tpu.spec.tables):
        descriptor = found.table_descriptor.add()
        descriptor.name = table.name
        # Each host has at least one row.
        descriptor.vocabulary_size = max(table.num_rows, num_hosts)
        descriptor.dimension = table.dim
        parameters = descriptor.optimization_parameters
        optimizer_protos.write_parameters(
            parameters, tpu.optimizers[index], tpu.learning_rates
        )
        if tpu.quantizations[index]:
            optimizer_protos.write_quantization(
                parameters, tpu.quantizations[index]
            )
    for feature, name, shape in zip(
        tpu.spec.features, tpu.feature_names, output_shapes
    ):
        descriptor = found.feature_descriptor.add()
        if name:
            descriptor.name = name
        descriptor.table_id = feature.table
        descriptor.input_shape.extend(shape)
    # `enqueue` says of each batch whether it trains.
    found.mode = found.TRAINING
    found.num_hosts = num_hosts
    found.num_tensor_cores = num_replicas * (num_cores_per_replica or 1)
    found.sharding_strategy = found.DIV_DEFAULT
    found.pipeline_execution_with_tensor_core = is_pipelined
    if num_cores_per_replica:
        found.spmd_sharding.enabled = True
        found.spmd_sharding.num_cores_per_replica = num_cores_per_replica
    return found
