"""`tlm.plan`: chooses layouts of weights, or shards of tables."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tf_layoutmap._core import checks
from tf_layoutmap.planning import tables
from tf_layoutmap.planning.costs import MachineCosts
from tf_layoutmap.planning.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras
    import tensorflow as tf

    from tf_layoutmap._core import literals
    from tf_layoutmap._core.types import (
        DTypeLike,
        FeatureConfigs,
        KerasLayer,
        TableKey,
    )
    from tf_layoutmap.embedding.configs.optimizer_specs import TableOptimizer
    from tf_layoutmap.embedding.inspection.inspect_ids import IdReport
    from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary

# Number of samples in a step of a Keras model.
_DEFAULT_MODEL_BATCH = 32


def plan(
    model_or_feature_config: KerasLayer | FeatureConfigs,
    *,
    memory: str | int | Sequence[str | int] | None = None,
    mesh: tf.experimental.dtensor.Mesh | Mapping[str, int] | None = None,
    num_servers: int | None = None,
    num_workers: int | None = None,
    id_report: IdReport | Mapping[str, object] | None = None,
    optimizer: TableOptimizer | keras.optimizers.Optimizer | str | None = None,
    batch_size: int | None = None,
    pins: Mapping[str, str] | None = None,
    table_dtypes: DTypeLike | Mapping[TableKey, DTypeLike] | None = None,
    vocabularies: Mapping[TableKey, OpenVocabulary] | None = None,
    wire_dtype: literals.WireDtype = "float32",
    costs: MachineCosts | str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans how the weights or tables of a model are stored.

    The plan with the shortest predicted step is selected among all plans whose
    memory is within the budget. The prediction uses the speed of this machine,
    which is measured once in at most 10 seconds and stored in a file.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> config = {
    ...     name: tpu.FeatureConfig(tpu.TableConfig(rows, 16, name=name))
    ...     for name, rows in {"words": 40_000, "users": 1_000}.items()}
    >>> plan = tlm.plan(
    ...     config, num_servers=2, memory="3MiB", optimizer=tpu.Adagrad(0.1),
    ...     pins={"users": "table"}, costs=tlm.planning.MachineCosts.typical())
    >>> plan.choices
    {'users': 'table on server 0', 'words': 'rows over 2 servers'}
    >>> plan((1_000, 16), "float32", name="users")
    [1, 1]

    A plan for tables is used as the argument `partitioner` of
    `tlm.TPUEmbedding`. A plan for a mesh has the method `layout_map`.

    Args:
      model_or_feature_config: A Keras model for a mesh, or the feature config
        of a `tlm.TPUEmbedding`.
      memory: Bytes that may be used on each device, server or process: a number
        of bytes, or a string such as `"24GiB"`. A list sets one size for each
        device. None is possible for a Keras model: each weight is then sharded
        if a step does not have to gather it.
      mesh: The mesh of a Keras model, or a dict with the size of each axis.
      num_servers: Number of parameter servers that store the tables.
      num_workers: Number of processes of a `MultiWorkerMirroredStrategy`. If
        neither `num_servers` nor `num_workers` is passed, one process stores
        the tables.
      id_report: Report of `tlm.inspect_ids` about the ids of the tables.
        Without a report, ids are assumed to be uniformly distributed.
      optimizer: Optimizer of the model, or of all tables whose `TableConfig`
        has no optimizer. It determines the slot variables.
      batch_size: Number of samples that each process passes in a step. The
        default is the batch size of `id_report`, 1,024 for tables without
        `id_report`, or 32 for a Keras model.
      pins: Choices that must be selected: the name of a table, layer or weight,
        and `"replicate"`, `"rows"`, `"columns"`, `"table"`, or the full name of
        a choice.
      table_dtypes: As for `tlm.TPUEmbedding`.
      vocabularies: As for `tlm.TPUEmbedding`.
      wire_dtype: As for `tlm.TPUEmbedding`.
      costs: A `MachineCosts`, or the path of the file in which measured costs
        are stored. The default path is the environment variable
        `TF_LAYOUTMAP_COSTS`, or a file in the user's cache folder. A damaged or
        older file is measured again.

    Returns:
      The plan.

    Raises:
      TypeError: If an argument has an unsupported type.
      ValueError: If an argument is invalid, or if no plan fits. The message
        then contains the missing bytes, and which changes would be sufficient.
      NotImplementedError: If tables share a vocabulary, and `num_servers` is
        passed.
    """
    if is_keras_layer(model_or_feature_config):
        _check_keras_3(model_or_feature_config)
        _check_unused(
            "a Keras model",
            num_servers=num_servers,
            num_workers=num_workers,
            id_report=id_report,
            table_dtypes=table_dtypes,
            vocabularies=vocabularies,
        )
        if mesh is None:
            raise ValueError(
                checks.message("mesh", "a mesh for a Keras model", mesh)
            )
        return _plan_model(
            model_or_feature_config,
            mesh,
            memory=memory,
            optimizer=optimizer,
            batch_size=batch_size or _DEFAULT_MODEL_BATCH,
            pins=pins or {},
            costs=costs,
        )
    _check_unused("a feature config", mesh=mesh)
    if memory is None:
        raise ValueError(
            checks.message("memory", 'a size such as "24GiB"', memory)
        )
    return tables.plan_tables(
        model_or_feature_config,
        num_servers=num_servers,
        num_workers=num_workers,
        memory=memory,
        id_report=id_report,
        optimizer=optimizer,
        batch_size=batch_size,
        pins=pins,
        table_dtypes=table_dtypes,
        vocabularies=vocabularies,
        wire_dtype=wire_dtype,
        costs=read_costs(costs),
    )


def _plan_model(
    model: Any,
    mesh: Any,
    *,
    memory: Any,
    optimizer: Any,
    batch_size: int,
    pins: Mapping[str, str],
    costs: MachineCosts | str | os.PathLike[str] | None,
) -> Plan:
    """Returns the plan of a Keras model on a mesh."""
    # The modules are imported here, because they import Keras.
    from tf_layoutmap.layout.mesh import device_mesh
    from tf_layoutmap.planning import keras_models

    sizes = dict(
        mesh if isinstance(mesh, Mapping) else device_mesh.axis_sizes(mesh)
    )
    return keras_models.plan_model(
        model,
        mesh,
        memory=memory,
        optimizer=optimizer,
        batch_size=batch_size,
        pins=pins,
        costs=read_costs(costs, math.prod(sizes.values())),
    )


def read_costs(
    costs: MachineCosts | str | os.PathLike[str] | None,
    num_devices: int | None = None,
) -> MachineCosts:
    """Returns the argument `costs`, or the costs of its file.

    Args:
      costs: See `plan`.
      num_devices: Number of devices of the mesh; None for all devices.

    Raises:
      TypeError: If `costs` has another type.
    """
    if isinstance(costs, MachineCosts):
        return costs
    if costs is not None and not isinstance(costs, str | os.PathLike):
        raise TypeError(
            checks.message("costs", "MachineCosts, a path, or None", costs)
        )
    # The probe is imported here, because only this function requires it.
    from tf_layoutmap.planning import probe

    return probe.machine(costs, num_devices)


def is_keras_layer(value: Any) -> bool:
    """Returns whether a value is a layer of Keras 3 or tf_keras."""
    return _is_layer_of("keras", value) or _is_layer_of("tf_keras", value)


def _is_layer_of(package: str, value: Any) -> bool:
    module = sys.modules.get(package)
    return module is not None and isinstance(value, module.layers.Layer)


def _check_keras_3(model: Any) -> None:
    if not _is_layer_of("keras", model):
        raise TypeError(
            "Argument `model_or_feature_config` must be a model of Keras 3 or "
            "a feature config, because layouts of tf_keras models are not "
            f"planned. Received: tf_keras model {model.name!r} "
            f"({type(model).__name__}). Pass a tlm.LayoutMap with a layout for "
            "each weight to layout_map_scope, or create the model with Keras 3."
        )


def _check_unused(kind: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(checks.message(name, f"None for {kind}", value))
