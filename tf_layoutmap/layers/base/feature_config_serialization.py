"""Serialization of feature configs for saved models."""

import inspect
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.embedding import optimizers
from tf_layoutmap.layers.base.keras_rs_configs import (
    ScheduledRate,
    TruncatedFeatureConfig,
    read_optimizer,
)

_tpu = tf.tpu.experimental.embedding
_OPTIMIZERS = {
    optimizer.__name__: optimizer
    for optimizer in (
        _tpu.SGD,
        _tpu.Adagrad,
        _tpu.AdagradMomentum,
        _tpu.Adam,
        _tpu.FTRL,
        optimizers.RowwiseAdagrad,
        optimizers.LAMB,
    )
}


def to_config(
    feature_config: Any, optimizer: Any, capacities: Mapping[str, int]
) -> dict[str, Any]:
    """Returns a feature config as plain values, the input of `from_config`.

    Initializers that Keras cannot serialize are omitted. A loaded layer does
    not need these initializers, because its rows are restored from the saved
    weights.

    Args:
      feature_config: Nested structure of `FeatureConfig`.
      optimizer: Optimizer of the tables that do not specify one.
      capacities: Capacities of tables with open vocabularies, by table name.

    Raises:
      ValueError: If a learning rate is a callable, which is not serializable.
    """
    tables: list[Any] = []

    def write(structure):
        if isinstance(structure, dict):
            return {
                "dict": {key: write(value) for key, value in structure.items()}
            }
        if isinstance(structure, (list, tuple)):
            return {
                type(structure).__name__: [write(value) for value in structure]
            }
        if not any(table is structure.table for table in tables):
            tables.append(structure.table)
        [table] = [
            number
            for number, table in enumerate(tables)
            if table is structure.table
        ]
        shape = structure.output_shape
        max_ids = getattr(structure, "max_ids", None)
        return {
            "feature": {
                **({} if max_ids is None else {"max_ids": max_ids}),
                "table": table,
                "name": structure.name,
                "max_sequence_length": structure.max_sequence_length,
                "validate_weights_and_indices": structure.validate_weights_and_indices,  # noqa: E501
                "output_shape": None if shape.rank is None else shape.as_list(),
            }
        }

    features = write(feature_config)
    return {
        "features": features,
        "tables": [
            {
                **_write_table(table, optimizer),
                "vocabulary_size": capacities.get(
                    table.name, table.vocabulary_size
                ),
            }
            for table in tables
        ],
    }


def from_config(saved: dict[str, Any]) -> Any:
    """Returns the nested structure of `FeatureConfig` from plain values."""
    tables = [_read_table(table) for table in saved["tables"]]

    def read(structure):
        [(kind, value)] = structure.items()
        if kind == "dict":
            return {key: read(item) for key, item in value.items()}
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](map(read, value))
        kind = (
            TruncatedFeatureConfig if "max_ids" in value else _tpu.FeatureConfig
        )
        return kind(**{**value, "table": tables[value["table"]]})

    return read(saved["features"])


def _write_table(table: Any, optimizer: Any) -> dict[str, Any]:
    quantization = table.quantization_config
    return {
        "vocabulary_size": table.vocabulary_size,
        "dim": table.dim,
        "combiner": table.combiner,
        "name": table.name,
        "initializer": _write_initializer(table.initializer),
        "optimizer": _write_optimizer(
            optimizer
            if table.optimizer is None
            else read_optimizer(table.optimizer, f"(table {table.name!r})")
        ),
        "quantization_config": None
        if quantization is None
        else [quantization.num_buckets, quantization.lower, quantization.upper],
    }


def _read_table(saved: dict[str, Any]) -> Any:
    saved = dict(saved)
    if saved["optimizer"] is not None:
        kind, written = saved["optimizer"]
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in written.items()
        }
        rate = settings.get("learning_rate")
        if isinstance(rate, dict):
            settings["learning_rate"] = ScheduledRate(
                keras.optimizers.schedules.deserialize(rate["schedule"])
            )
        saved["optimizer"] = _OPTIMIZERS[kind](**settings)
    if saved["initializer"] is not None:
        saved["initializer"] = keras.initializers.deserialize(
            saved["initializer"]
        )
    if saved["quantization_config"] is not None:
        saved["quantization_config"] = _tpu.QuantizationConfig(
            *saved["quantization_config"]
        )
    return _tpu.TableConfig(**saved)


def _write_initializer(initializer: Any) -> Any:
    if not isinstance(initializer, keras.initializers.Initializer):
        return None
    return keras.initializers.serialize(initializer)


def _write_optimizer(optimizer: Any) -> Any:
    if optimizer is None:
        return None
    rate = optimizer.learning_rate
    if callable(rate) and not isinstance(rate, ScheduledRate):
        raise ValueError(
            "A model with a dynamic learning rate must not be saved with its "
            "configuration; use `save_weights`, or a learning rate that is a "
            f"number. Received: learning_rate={optimizer.learning_rate!r}."
        )
    names = set(inspect.signature(type(optimizer)).parameters)
    if isinstance(optimizer, optimizers.HostOptimizer):
        names |= set(inspect.signature(optimizers.HostOptimizer).parameters)
    settings = {
        name: getattr(optimizer, name)
        for name in sorted(names)
        if hasattr(optimizer, name)
    }
    if isinstance(rate, ScheduledRate):
        settings["learning_rate"] = {
            "schedule": keras.optimizers.schedules.serialize(rate.schedule)
        }
    clip = (optimizer.clip_gradient_min, optimizer.clip_gradient_max)
    if clip != (None, None):
        settings["clipvalue"] = list(clip)
    return [type(optimizer).__name__, settings]
