"""Conversion of the configs of keras-rs to the configs of TensorFlow.

This module recognizes the configs of keras-rs 0.4 by their fields, and does not
require the package keras-rs. If the host engine does not support a setting, the
functions raise an error that names the setting. `ScheduledRate` is a table's
learning rate that follows a Keras schedule.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.embedding import inputs
from tf_layoutmap.vocabulary import key_tensors


class ScheduledRate:
    """Learning rate of tables that follows a Keras schedule.

    The object is a callable without arguments, as a table's optimizer requires.
    A schedule is a function of the step number. The layer that owns the tables
    therefore counts the updates in the variable `updates`.

    Attributes:
      schedule: The schedule, of Keras 3 or tf_keras.
      updates: Integer variable that counts the updates; None before the layer
        is built.
    """

    # The variable is on the host, where a TPU program cannot read it.
    is_on_host = True

    def __init__(self, schedule: Any):
        """Creates the rate from a Keras `LearningRateSchedule`."""
        self.schedule = schedule
        self.updates: tf.Variable | None = None

    def __call__(self) -> tf.Tensor:
        """Returns the rate of the next update, a float32 scalar."""
        step = 0 if self.updates is None else self.updates.read_value()
        return tf.cast(self.schedule(step), tf.float32)


_tpu = tf.tpu.experimental.embedding

# Maps each Keras optimizer to the TPU optimizer class, the settings that both
# classes have, and the settings that only Keras has. The settings of the last
# group must have their default values.
_RULES = {
    "SGD": (_tpu.SGD, (), {"momentum": 0.0, "nesterov": False}),
    "Adagrad": (
        _tpu.Adagrad,
        ("initial_accumulator_value",),
        {"epsilon": 1e-7},
    ),
    "Adam": (_tpu.Adam, ("beta_1", "beta_2", "epsilon"), {"amsgrad": False}),
    "Ftrl": (
        _tpu.FTRL,
        (
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "beta",
        ),
        {"l2_shrinkage_regularization_strength": 0.0},
    ),
}
_BY_NAME = {name.lower(): name for name in _RULES}
# Settings that every Keras optimizer has, and no table optimizer supports.
_UNSUPPORTED = {
    "clipnorm": None,
    "global_clipnorm": None,
    "use_ema": False,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


class TruncatedFeatureConfig(_tpu.FeatureConfig):
    """A `FeatureConfig` that truncates each sample to its first ids.

    Attributes:
      max_ids: Maximum number of ids that are looked up for each ragged or
        sparse sample. A dense input must have exactly this width.
    """

    def __init__(self, *args: Any, max_ids: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_ids = max_ids


def sparse_core_config(feature_config: Any) -> Any:
    """Returns the id limits of keras-rs' tables as TensorFlow's config.

    Args:
      feature_config: Nested structure of keras-rs' or TensorFlow's
        `FeatureConfig` objects.
    """
    tables = {
        feature.table.name: feature.table
        for feature in tf.nest.flatten(feature_config)
        if _is_of_keras_rs(feature)
    }
    return _tpu.SparseCoreEmbeddingConfig(
        max_ids_per_table={
            name: table.max_ids_per_partition for name, table in tables.items()
        },
        max_unique_ids_per_table={
            name: table.max_unique_ids_per_partition
            for name, table in tables.items()
        },
    )


def _is_of_keras_rs(feature: Any) -> bool:
    return hasattr(getattr(feature, "table", None), "embedding_dim")


def to_tensorflow_configs(
    feature_config: Any, num_replicas: int | None = None
) -> Any:
    """Returns a feature config in which keras-rs' configs are converted.

    Args:
      feature_config: Nested structure of keras-rs' or TensorFlow's
        `FeatureConfig` objects. The objects of TensorFlow are returned
        unchanged.
      num_replicas: Number of replicas if the tables are on SparseCores,
        otherwise None. On SparseCores, features have an `output_shape`.

    Raises:
      ValueError: If a setting is not supported. The message names the setting
        and its table or feature.
      TypeError: If an optimizer is not supported for tables.
    """
    tables: list[tuple[Any, Any]] = []

    def table_of(feature):
        for known, table in tables:
            if known is feature.table:
                return table
        tables.append(
            (
                feature.table,
                _read_table(feature.table, num_replicas is not None),
            )
        )
        return tables[-1][1]

    def convert(feature):
        if not _is_of_keras_rs(feature):
            return feature
        max_ids = _max_ids(feature)
        settings = {"table": table_of(feature), "name": feature.name}
        if num_replicas is not None:
            settings["output_shape"] = _output_shape(feature, num_replicas)
        return (
            _tpu.FeatureConfig(**settings)
            if max_ids is None
            else TruncatedFeatureConfig(**settings, max_ids=max_ids)
        )

    return tf.nest.map_structure(convert, feature_config)


@contextlib.contextmanager
def optimizers_of_tables(feature_config: Any) -> Iterator[None]:
    """Context in which each `TableConfig` has an optimizer of TensorFlow.

    A `TableConfig` may have a Keras optimizer, or a learning rate that is a
    Keras schedule. The configs are changed only inside the context, because
    several layers may use the same config, and each layer counts its updates.

    Args:
      feature_config: Nested structure of TensorFlow's `FeatureConfig` objects.

    Raises:
      ValueError, TypeError: As for `read_optimizer`.
    """
    tables = {
        id(feature.table): feature.table
        for feature in tf.nest.flatten(feature_config)
        if getattr(feature, "table", None) is not None
    }
    optimizers = {number: table.optimizer for number, table in tables.items()}
    try:
        for number, optimizer in optimizers.items():
            table = tables[number]
            if _is_keras_optimizer(optimizer) or _is_schedule(
                getattr(optimizer, "learning_rate", None)
            ):
                table.optimizer = read_optimizer(
                    optimizer, f"(table {table.name!r})"
                )
        yield
    finally:
        for number, optimizer in optimizers.items():
            tables[number].optimizer = optimizer


def _is_keras_optimizer(optimizer: Any) -> bool:
    """Returns whether a value is an optimizer of Keras 3 or tf_keras."""
    return hasattr(optimizer, "apply_gradients") and hasattr(
        optimizer, "get_config"
    )


def truncate_ids(feature: Any, ids: Any, weights: Any) -> tuple[Any, Any]:
    """Returns ids and weights of one input with at most `max_ids` per sample.

    Dense ids with weights become ragged, because the engine requires ragged or
    sparse ids when weights are passed.

    Raises:
      ValueError: If the width of a dense input is not `max_ids`, or dense
        weights do not have the shape of the ids.
    """
    if isinstance(ids, key_tensors.PackedKeys):
        kept, weights = truncate_ids(feature, ids.ids, weights)
        return key_tensors.PackedKeys(kept, ids.kind), weights
    max_ids = getattr(feature, "max_ids", None)
    where = f"(feature {getattr(feature, 'name', None)!r})"
    if weights is not None and _is_dense(ids) and _is_dense(weights):
        # Dense ids that are too wide raise an error and are not truncated,
        # because XLA does not compile slices of ragged tensors.
        return _to_ragged(
            tf.convert_to_tensor(ids),
            tf.convert_to_tensor(weights),
            max_ids,
            where,
        )
    if max_ids is None:
        return ids, weights
    if isinstance(ids, tf.SparseTensor):
        return _truncate_sparse(feature, ids, weights, max_ids)
    if isinstance(ids, tf.RaggedTensor):
        if weights is not None:
            weights = weights[:, :max_ids]
        return ids[:, :max_ids], weights
    _check_width(ids, max_ids, where)
    return ids, weights


def ragged_samples(feature: Any, ids: Any) -> Any:
    """Returns dense ids as ragged ids if a sample has several ids.

    SparseCores use each id of a dense input as a sample.

    Args:
      feature: The `FeatureConfig`, with an `output_shape`.
      ids: Ids of the feature.
    """
    if (
        not _is_dense(ids)
        or len(ids.shape) != feature.output_shape.rank + 1
        or ids.shape[-1] == 1
    ):
        return ids
    ids = tf.convert_to_tensor(ids)
    return tf.RaggedTensor.from_tensor(  # pyright: ignore[reportAttributeAccessIssue] Missing in the stubs.
        tf.reshape(ids, [-1, ids.shape[-1]])
    )


def _is_dense(value) -> bool:
    return not isinstance(value, (tf.SparseTensor, tf.RaggedTensor))


def _check_width(ids, max_ids, where):
    width = ids.shape[-1] if len(ids.shape) > 1 else max_ids
    if width not in (None, max_ids):
        raise ValueError(
            f"A dense input must have {max_ids} ids per sample, the last "
            "dimension of its `input_shape`. Received: shape "
            f"{tuple(ids.shape)} {where}."
        )


def _to_ragged(ids, weights, max_ids, where):
    """Returns dense ids and weights, 1-D or 2-D, as ragged tensors."""
    if ids.shape.rank not in (1, 2) or not ids.shape.is_compatible_with(
        weights.shape
    ):
        raise ValueError(
            "Weights of dense ids must have the shape of the ids, "
            "[num_samples] or [num_samples, ids per sample]. Received: ids of "
            "shape "
            f"{ids.shape}, weights of shape {weights.shape} {where}."
        )
    if max_ids is not None:
        _check_width(ids, max_ids, where)
    check = tf.debugging.assert_equal(
        tf.shape(ids),
        tf.shape(weights),
        f"Weights of dense ids must have the shape of the ids {where}.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        weights = tf.identity(weights)
    if ids.shape.rank == 1:
        ids, weights = ids[:, tf.newaxis], weights[:, tf.newaxis]
    ragged = tf.RaggedTensor.from_tensor(ids)  # pyright: ignore[reportAttributeAccessIssue] Missing in the stubs.
    return ragged, ragged.with_values(tf.reshape(weights, [-1]))


def _truncate_sparse(feature, ids, weights, max_ids):
    """Returns the first `max_ids` ids of each sample of a sparse input."""
    samples = ids.indices[:, 0]
    positions = tf.range(tf.size(samples, tf.int64), dtype=tf.int64) - (
        tf.searchsorted(samples, samples, side="left", out_type=tf.int64)
    )
    kept = positions < max_ids
    if isinstance(weights, tf.SparseTensor):
        # All indices of the ids and the weights are compared before any id is
        # dropped.
        checked = inputs.same_positions(
            feature, "indices", ids.indices, weights.indices
        )
        with tf.control_dependencies([checked]):
            kept = tf.identity(kept)
        weights = tf.sparse.retain(weights, kept)
    return tf.sparse.retain(ids, kept), weights


def _max_ids(feature) -> int | None:
    """Checks both shapes of a feature; returns its number of ids per sample."""
    input_shape = tuple(feature.input_shape)
    output_shape = tuple(feature.output_shape)
    samples = input_shape[: max(len(input_shape) - 1, 1)]
    if not input_shape or output_shape != (
        *samples,
        feature.table.embedding_dim,
    ):
        raise ValueError(
            "`output_shape` must be `input_shape` with the table's "
            "`embedding_dim` in place of the ids of a sample, "
            f"{(*samples, feature.table.embedding_dim)}. Received: "
            f"input_shape={input_shape}, output_shape={output_shape} (feature "
            f"{feature.name!r})."
        )
    return input_shape[-1] if len(input_shape) > 1 else None


def _output_shape(feature, num_replicas: int) -> list[int]:
    """Returns the shape of the samples of one replica."""
    batch_size, *sizes = tuple(feature.output_shape)[:-1]
    if batch_size is None or batch_size % num_replicas:
        raise ValueError(
            "The batch size in `output_shape` must be a multiple of the number "
            f"of replicas, {num_replicas}. Received: "
            f"output_shape={feature.output_shape} (feature {feature.name!r})."
        )
    return [batch_size // num_replicas, *sizes]


def _read_table(table, on_sparse_cores: bool):
    where = f"(table {table.name!r})"
    # The host engine has no buffers whose size the ids-per-partition settings
    # determine.
    if table.placement != "auto" and not (
        on_sparse_cores and table.placement == "sparsecore"
    ):
        raise ValueError(
            '`placement` of a TableConfig of keras-rs must be "auto": this '
            "layer keeps its tables on the host, each with its optimizer. For "
            '"default_device" use a tlm.layers.ShardedEmbedding with '
            "optimizer=None. Received: "
            f"placement={table.placement!r} {where}."
        )
    return _tpu.TableConfig(
        vocabulary_size=table.vocabulary_size,
        dim=table.embedding_dim,
        initializer=keras.initializers.get(table.initializer),
        optimizer=read_optimizer(table.optimizer, where),
        combiner=table.combiner,
        name=table.name,
    )


def read_optimizer(optimizer: Any, where: str) -> Any:
    """Returns the TPU optimizer for a Keras optimizer or its name.

    Args:
      optimizer: A Keras optimizer, its name, an optimizer of
        `tf.tpu.experimental.embedding`, or None. An optimizer of
        `tf.tpu.experimental.embedding` and None are returned unchanged, except
        if the learning rate is a Keras schedule.
      where: Table or layer, appended to error messages.

    Raises:
      ValueError: If the TPU optimizer has no counterpart for a setting.
      TypeError: If there is no TPU optimizer of this kind.
    """
    if optimizer is None:
        return None
    if hasattr(optimizer, "use_gradient_accumulation"):
        if not _is_schedule(optimizer.learning_rate):
            return optimizer
        scheduled = copy.copy(optimizer)
        scheduled.learning_rate = ScheduledRate(optimizer.learning_rate)
        return scheduled
    if isinstance(optimizer, str):
        if optimizer.lower() not in _BY_NAME:
            raise ValueError(
                f"The optimizer of a table must be one of {list(_BY_NAME)}. "
                f"Received: optimizer={optimizer!r} {where}."
            )
        return _RULES[_BY_NAME[optimizer.lower()]][0]()
    # Subclasses can have other update rules. For example, AdamW is a subclass
    # of Adam.
    name = type(optimizer).__name__
    if not isinstance(optimizer, keras.optimizers.Optimizer) or (
        type(optimizer) is not getattr(keras.optimizers, name, None)
        or name not in _RULES
    ):
        raise TypeError(
            "The optimizer of a table must be a keras.optimizers "
            f"{', '.join(_RULES)}, its name, or an optimizer of "
            f"tf.tpu.experimental.embedding. Received: {optimizer!r} {where}."
        )
    rule, settings, absent = _RULES[name]
    for setting, default in {**_UNSUPPORTED, **absent}.items():
        value = getattr(optimizer, setting)
        if value != default:
            raise ValueError(
                f"`{setting}` of a table's optimizer must be {default!r}; "
                f"the TPU's {rule.__name__} has no such setting. Received: "
                f"{setting}={value!r} {where}."
            )
    return rule(
        _read_rate(optimizer, where),
        clipvalue=optimizer.clipvalue,
        weight_decay_factor=optimizer.weight_decay,
        **{setting: getattr(optimizer, setting) for setting in settings},
    )


def _is_schedule(rate: Any) -> bool:
    """Returns whether a learning rate is a schedule of Keras 3 or tf_keras."""
    return any(
        kind.__name__ == "LearningRateSchedule" for kind in type(rate).__mro__
    )


def _read_rate(optimizer, where):
    rate_or_schedule = keras_private.learning_rate_of(optimizer)
    if _is_schedule(rate_or_schedule):
        return ScheduledRate(rate_or_schedule)
    rate = (
        rate_or_schedule
        if callable(rate_or_schedule)
        else (optimizer.get_config()["learning_rate"])
    )
    if not callable(rate) and not isinstance(rate, float):
        raise ValueError(
            "The learning rate of a table's optimizer must be a number, a "
            "callable without arguments or a schedule of keras.optimizers. "
            f"Received: {rate!r} {where}."
        )
    return rate
