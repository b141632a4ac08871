"""keras-rs' table and feature configs, read as TensorFlow's.

They are known by their fields, those of keras-rs 0.4: the package is not
needed. What they say and the host engine does not do is refused by its name.
"""

# DOC-MERGE: A learning rate of tables that follows a schedule of Keras.
from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.embedding import inputs


class ScheduledRate:
    """A callable without arguments, as a table's optimizer takes it.

    A schedule is a function of a step. The layer that has the tables counts
    its updates, and says where.

    Attributes:
      schedule: The schedule, of either Keras.
      updates: An integer variable; None before the layer is built.
    """

    def __init__(self, schedule: Any):
        """Takes a `keras.optimizers.schedules.LearningRateSchedule`."""
        self.schedule = schedule
        self.updates: tf.Variable | None = None

    def __call__(self) -> tf.Tensor:
        """Returns the rate of the next update, a float32 scalar."""
        step = 0 if self.updates is None else self.updates.read_value()
        return tf.cast(self.schedule(step), tf.float32)


_tpu = tf.tpu.experimental.embedding

# The TPU's rule of each optimizer, the settings both have, and those that
# must be as Keras has them by default: the rule has no such thing.
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
# Of every Keras optimizer: what no table's rule does.
_NOT_DONE = {
    "clipnorm": None,
    "global_clipnorm": None,
    "use_ema": False,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


class CutFeatureConfig(_tpu.FeatureConfig):
    """A `FeatureConfig` of which only the first ids of a sample count.

    Attributes:
      max_ids: Ids of a ragged sample that are looked up; the width of a
        dense input.
    """

    def __init__(self, *args: Any, max_ids: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_ids = max_ids


def read(feature_config: Any) -> Any:
    """Returns the feature config with keras-rs' configs as TensorFlow's.

    Args:
      feature_config: Nested structure of `FeatureConfig` of keras-rs or of
        TensorFlow; the latter are returned as they are.

    Raises:
      ValueError: If a fact has no counterpart; names it, and where it is.
      TypeError: If an optimizer is none that a table can have.
    """
    tables: list[tuple[Any, Any]] = []

    def table_of(feature):
        for known, table in tables:
            if known is feature.table:
                return table
        tables.append((feature.table, _read_table(feature.table)))
        return tables[-1][1]

    def read_one(feature):
        if not hasattr(getattr(feature, "table", None), "embedding_dim"):
            return feature
        max_ids = _max_ids(feature)
        facts = {"table": table_of(feature), "name": feature.name}
        return (
            _tpu.FeatureConfig(**facts)
            if max_ids is None
            else CutFeatureConfig(**facts, max_ids=max_ids)
        )

    return tf.nest.map_structure(read_one, feature_config)


def cut(feature: Any, ids: Any, weights: Any) -> tuple[Any, Any]:
    """Returns ids and weights of one input, at most `max_ids` per sample.

    Weights of dense ids make both ragged: the engine takes weights so.

    Raises:
      ValueError: If a dense input has another width, or its weights another
        shape.
    """
    max_ids = getattr(feature, "max_ids", None)
    where = f"(feature {getattr(feature, 'name', None)!r})"
    if weights is not None and _is_dense(ids) and _is_dense(weights):
        # Of the right width: to cut them, too, XLA would have to compile
        # slices of ragged tensors, which it cannot.
        return _to_ragged(
            tf.convert_to_tensor(ids),
            tf.convert_to_tensor(weights),
            max_ids,
            where,
        )
    if max_ids is None:
        return ids, weights
    if isinstance(ids, tf.SparseTensor):
        return _cut_sparse(feature, ids, weights, max_ids)
    if isinstance(ids, tf.RaggedTensor):
        if weights is not None:
            weights = weights[:, :max_ids]
        return ids[:, :max_ids], weights
    _check_width(ids, max_ids, where)
    return ids, weights


def _is_dense(value) -> bool:
    return not isinstance(value, (tf.SparseTensor, tf.RaggedTensor))


def _check_width(ids, max_ids, where):
    width = ids.shape[-1] if len(ids.shape) > 1 else max_ids
    if width not in (None, max_ids):
        raise ValueError(
            f"A dense input must have {max_ids} ids per sample, the last of "
            f"its `input_shape`. Received: shape {tuple(ids.shape)} {where}."
        )


def _to_ragged(ids, weights, max_ids, where):
    """Dense ids and weights, `[num_samples]` or `[num_samples, n]`."""
    if ids.shape.rank not in (1, 2) or not ids.shape.is_compatible_with(
        weights.shape
    ):
        raise ValueError(
            "Weights of dense ids must have their shape, [num_samples] or "
            "[num_samples, ids per sample]. Received: ids of shape "
            f"{ids.shape}, weights of shape {weights.shape} {where}."
        )
    if max_ids is not None:
        _check_width(ids, max_ids, where)
    check = tf.debugging.assert_equal(
        tf.shape(ids),
        tf.shape(weights),
        f"Weights of dense ids must have their shape {where}.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        weights = tf.identity(weights)
    if ids.shape.rank == 1:
        ids, weights = ids[:, tf.newaxis], weights[:, tf.newaxis]
    ragged = tf.RaggedTensor.from_tensor(ids)  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
    return ragged, ragged.with_values(tf.reshape(weights, [-1]))


def _cut_sparse(feature, ids, weights, max_ids):
    """The first ids of each sample, at any positions in it."""
    samples = ids.indices[:, 0]
    positions = tf.range(tf.size(samples, tf.int64), dtype=tf.int64) - (
        tf.searchsorted(samples, samples, side="left", out_type=tf.int64)
    )
    kept = positions < max_ids
    if isinstance(weights, tf.SparseTensor):
        # All of them are compared with the ids, before any is left out.
        checked = inputs.same_positions(
            feature, "indices", ids.indices, weights.indices
        )
        with tf.control_dependencies([checked]):
            kept = tf.identity(kept)
        weights = tf.sparse.retain(weights, kept)
    return tf.sparse.retain(ids, kept), weights


def _max_ids(feature) -> int | None:
    """Ids per sample, after a check that the shapes go together."""
    given, wanted = tuple(feature.input_shape), tuple(feature.output_shape)
    samples = given[: max(len(given) - 1, 1)]
    if not given or wanted != (*samples, feature.table.embedding_dim):
        raise ValueError(
            "`output_shape` must be `input_shape` with the table's "
            "`embedding_dim` in place of the ids of a sample, "
            f"{(*samples, feature.table.embedding_dim)}. Received: "
            f"input_shape={given}, output_shape={wanted} (feature "
            f"{feature.name!r})."
        )
    return given[-1] if len(given) > 1 else None


def _read_table(table):
    where = f"(table {table.name!r})"
    # Of the ids per partition nothing is asked: they size the buffers of a
    # SparseCore, and the host engine drops no id for lack of room.
    if table.placement != "auto":
        raise ValueError(
            '`placement` of a TableConfig of keras-rs must be "auto": the '
            "tables of this layer are on the host, with optimizers of their "
            'own. One of "default_device" is a tlm.layers.ShardedEmbedding '
            "with optimizer=None. Received: "
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
    """Returns a table's optimizer, of Keras or by name, as the TPU's rule.

    Args:
      optimizer: A Keras optimizer, its name, one of
        `tf.tpu.experimental.embedding`, or None; the last two are returned.
      where: What is said at the end of a message.

    Raises:
      ValueError: If it has a setting that the rule has not.
      TypeError: If no rule is like it.
    """
    if optimizer is None or hasattr(optimizer, "use_gradient_accumulation"):
        return optimizer
    if isinstance(optimizer, str):
        if optimizer.lower() not in _BY_NAME:
            raise ValueError(
                f"The optimizer of a table must be one of {list(_BY_NAME)}. "
                f"Received: optimizer={optimizer!r} {where}."
            )
        return _RULES[_BY_NAME[optimizer.lower()]][0]()
    # Not a subclass: AdamW is one of Adam.
    name = type(optimizer).__name__
    if not isinstance(optimizer, keras.optimizers.Optimizer) or (
        type(optimizer) is not getattr(keras.optimizers, name, None)
        or name not in _RULES
    ):
        raise TypeError(
            "The optimizer of a table must be a keras.optimizers "
            f"{', '.join(_RULES)}, the name of one, or one of "
            f"tf.tpu.experimental.embedding. Received: {optimizer!r} {where}."
        )
    rule, settings, absent = _RULES[name]
    for setting, default in {**_NOT_DONE, **absent}.items():
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


def _read_rate(optimizer, where):
    given = keras_private.learning_rate_of(optimizer)
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return ScheduledRate(given)
    rate = (
        given if callable(given) else (optimizer.get_config()["learning_rate"])
    )
    if not callable(rate) and not isinstance(rate, float):
        raise ValueError(
            "The learning rate of a table's optimizer must be a number, a "
            "callable without arguments or a schedule of keras.optimizers. "
            f"Received: {rate!r} {where}."
        )
    return rate
