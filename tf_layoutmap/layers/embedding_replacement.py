"""`shard_embeddings` and `sharded_embeddings`: stock layers with fast steps.

Both replace `Embedding` layers in place and return an `EmbeddingReport`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import patches
from tf_layoutmap.layers.base import construction
from tf_layoutmap.layers.base.embedding_report import (
    EmbeddingReport,
    plan_replacement,
)
from tf_layoutmap.layers.base.stock_embeddings import (
    Replacer,
    Settings,
)

# This import also registers the class of replaced layers with Keras, which is
# required to load a saved model.
from tf_layoutmap.layers.keras3.stock_embedding import Keras3Replacer

if TYPE_CHECKING:
    from tf_layoutmap._core.types import KerasLayer
    from tf_layoutmap.embedding.configs.optimizer_specs import TableOptimizer

_GROUPS = {
    "keras": "keras3_embedding_creation",
    "tf_keras": "tf_keras_embedding_creation",
}


def _tf_keras_replacer(settings: Settings) -> Replacer:
    from tf_layoutmap.layers.tf_keras.stock_embedding import TfKerasReplacer

    return TfKerasReplacer(settings)


def _tf_keras() -> Any | None:
    """Returns tf_keras if the program uses it, else None."""
    if os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):
        with contextlib.suppress(ModuleNotFoundError):
            import tf_keras  # noqa: F401
    return sys.modules.get("tf_keras")


def _replacer_of(model: Any, settings: Settings) -> Replacer:
    if isinstance(model, keras.layers.Layer):
        return Keras3Replacer(settings)
    tf_keras = _tf_keras()
    if tf_keras is not None and isinstance(model, tf_keras.layers.Layer):
        return _tf_keras_replacer(settings)
    raise TypeError(
        _core_checks.message(
            "model", "a model or layer of Keras 3 or tf_keras", model, ""
        )
    )


def shard_embeddings(
    model: KerasLayer,
    *,
    min_rows: int = 1_000,
    optimizer: str | keras.optimizers.Optimizer | TableOptimizer = "model",
    num_shards: int = 1,
    replace_regularized: bool = False,
    ids_per_step: int = 2048,
    dry_run: bool = False,
    memory: str | int | None = None,
    pins: Mapping[str, str] | None = None,
) -> EmbeddingReport:
    """Replaces the large `Embedding` layers of a model in place.

    Each replaced layer remains the same object, with the same name, path,
    weight values, mask, dtype policy and `trainable`, and becomes a
    `ShardedEmbedding`: a training step reads and writes only the rows of the
    batch. Weight files of the stock model can be loaded into the model, and
    weight files of the model into a stock model.

    >>> import keras
    >>> import tf_layoutmap as tlm
    >>> model = keras.Sequential([
    ...     keras.Input([2], dtype="int64"),
    ...     keras.layers.Embedding(2000, 4, name="words"),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.Adam(0.001), "mse")
    >>> report = tlm.layers.shard_embeddings(model)
    >>> len(report.replaced), len(report.not_replaced)
    (1, 0)
    >>> report.replaced[0].rule
    "Adam, learning rate 0.001 (the model's optimizer)"
    >>> isinstance(model.get_layer("words"), tlm.layers.ShardedEmbedding)
    True

    By default, the tables follow the optimizer of the model: the rows of a
    batch are updated with the rule, the hyperparameters, the current learning
    rate, the weight decay and the clipping of the optimizer that is passed to
    `compile`, before or after this call. With SGD without momentum and Adagrad,
    training equals the stock model up to rounding, also if a batch contains an
    id several times. With Adam and other optimizers, the same is true for rows
    that every step looks up; rows that a step does not look up are not updated.
    The report contains the rule and the learning rate of each table, and the
    differences.

    A layer is not replaced if training would differ without a statement in the
    report. The report contains the reason, for example: the layer has a
    regularizer or a constraint, is quantized, has LoRA weights, shares its
    weight with another layer, or belongs to a subclass that overrides `call`.
    `keras.layers.ReversibleEmbedding`, its keras-hub subclass and
    `keras_rs.layers.EmbedReduce` are supported.

    Call this function before the model is trained. If the model is already
    built, the rows are copied, and the memory of the stock weights is freed.

    Args:
      model: A functional, sequential or subclassed model of Keras 3 or
        tf_keras, or a layer. It may be built or not. Layers that a subclassed
        model creates later are not replaced; use `sharded_embeddings`.
      min_rows: Tables with fewer rows are not replaced.
      optimizer: Optimizer of the replaced tables. With `"model"`, the tables
        follow the optimizer of the model, which must be SGD, Adagrad, Adam,
        AdamW, RMSprop, Ftrl or Lamb. For a separate optimizer, to which no
        setting of the model's optimizer applies, pass an `SGD` without momentum
        or an `Adagrad` of the model's Keras version, whose settings are copied;
        an optimizer of `tf.tpu.experimental.embedding`; or `"sgd"` or
        `"adagrad"` with the defaults of Keras, whose learning rates of 0.01 and
        0.001 are small for embeddings.
      num_shards: Maximum number of shards of a table.
      replace_regularized: Whether layers with a regularizer or a constraint are
        also replaced. Both are then applied to the rows of a batch instead of
        the full table.
      ids_per_step: Number of ids that a step looks up in each table, for the
        expected times of the report.
      dry_run: Whether to compute only the report, without changes.
      memory: Bytes that the tables of all `Embedding` layers and their slot
        variables may use, such as `"16GiB"`. The layers are then replaced by a
        plan, `report.plan`: the fastest one that fits. If no plan fits, the
        function raises an error, and the model is unchanged. With None, all
        layers that can be replaced are replaced.
      pins: `"stock"` or `"sharded"`, by path of the layer, for the plan.

    Returns:
      The report. `report.plan` explains the choice for each layer.

    Raises:
      TypeError: If `model` or `optimizer` has an unsupported type.
      ValueError: If an argument is invalid, if the tables cannot follow the
        model's optimizer, if this optimizer already has slot variables for the
        tables, or if no plan fits.
    """
    settings = Settings(min_rows, optimizer, num_shards, replace_regularized)
    if memory is None and pins:
        raise ValueError(
            _core_checks.message("pins", "None without `memory`", pins)
        )
    return _replacer_of(model, settings).replace(
        model,
        dry_run=dry_run,
        ids_per_step=_core_checks.check_int(
            "ids_per_step", ids_per_step, lowest=1
        ),
        plan=None
        if memory is None
        else lambda report: plan_replacement(report, memory, pins),
    )


@contextlib.contextmanager
def sharded_embeddings(
    *,
    min_rows: int = 1_000,
    optimizer: str | keras.optimizers.Optimizer | TableOptimizer = "model",
    num_shards: int = 1,
    replace_regularized: bool = False,
    ids_per_step: int = 2048,
) -> Iterator[EmbeddingReport]:
    """Replaces the large `Embedding` layers that are created inside `with`.

    This is `shard_embeddings` for code that builds, and possibly trains, its
    own model. Layers of Keras 3 and of tf_keras are replaced, if the current
    thread creates them. tf_keras must be imported before the scope.

    >>> import keras
    >>> import tf_layoutmap as tlm
    >>> with tlm.layers.sharded_embeddings(min_rows=500) as report:
    ...     layer = keras.layers.Embedding(1000, 4)
    >>> isinstance(layer, tlm.layers.ShardedEmbedding)
    True
    >>> len(report.replaced)
    1

    Args:
      min_rows: Tables with fewer rows are not replaced.
      optimizer: Optimizer of the replaced tables, as for `shard_embeddings`.
        The optimizer must not belong to one Keras version if layers of the
        other version are created.
      num_shards: Maximum number of shards of a table.
      replace_regularized: Whether layers with a regularizer or a constraint are
        also replaced; see `shard_embeddings`.
      ids_per_step: Number of ids that a step looks up in each table, for the
        expected times of the report.

    Yields:
      The report, to which each created layer is added.

    Raises:
      TypeError, ValueError: If an argument is invalid.
    """
    settings = Settings(min_rows, optimizer, num_shards, replace_regularized)
    _core_checks.check_int("ids_per_step", ids_per_step, lowest=1)
    tf_keras = _tf_keras()
    if tf_keras is not None and isinstance(
        optimizer, tf_keras.optimizers.Optimizer
    ):
        replacers: dict[str, Replacer] = {
            "tf_keras": _tf_keras_replacer(settings)
        }
    else:
        replacers = {"keras": Keras3Replacer(settings)}
        if tf_keras is not None and not isinstance(
            optimizer, keras.optimizers.Optimizer
        ):
            replacers["tf_keras"] = _tf_keras_replacer(settings)
    (first, *_) = replacers.values()
    report = EmbeddingReport(
        stock_rule=first.report_rule(first.rule_name), ids_per_step=ids_per_step
    )
    with contextlib.ExitStack() as stack:
        for version in replacers:
            patches.install(_GROUPS[version])
            stack.callback(patches.uninstall, _GROUPS[version])
        stack.enter_context(
            construction.replacing(list(replacers.values()), report)
        )
        yield report
    if tf_keras is None and "tf_keras" in sys.modules:
        warnings.warn(
            "tf_keras was imported inside `sharded_embeddings`, so that no "
            "layer of tf_keras was replaced; import tf_keras before.",
            stacklevel=3,
        )
