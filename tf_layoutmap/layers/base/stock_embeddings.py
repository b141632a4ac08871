"""Decides which stock `Embedding` layers are replaced, and replaces them.

`Replacer` is the part that both Keras versions share. A layer is replaced in
place: the object gets another class and another weight, so that every model,
attribute and list that contains the layer remains valid.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import strategies
from tf_layoutmap.embedding.configs.optimizer_specs import (
    OptimizerSpec,
    SlotSpec,
)
from tf_layoutmap.layers.base import model_rules, tables
from tf_layoutmap.layers.base.embedding_report import (
    STOCK,
    EmbeddingEntry,
    EmbeddingReport,
)
from tf_layoutmap.layers.base.model_optimizer import UNKNOWN_RULE
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore

# Settings of a Keras optimizer that would not apply to a table.
OTHER_SETTINGS = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
)
# Reason for layers that a plan does not replace.
_PLANNED_REASON = (
    "the plan keeps the stock layer; see `report.memory_plan.explain`"
)
# Number of slot variables of a stock optimizer by the name of its class; 2 for
# all other optimizers.
_STOCK_SLOTS = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Lion": 1}
# Methods that a subclass of `Embedding` may not override.
_METHODS = frozenset(
    {
        "__call__",
        "add_weight",
        "build",
        "call",
        "compute_mask",
        "compute_output_shape",
        "compute_output_spec",
        "embeddings",
        "load_own_variables",
        "save_own_variables",
    }
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of `shard_embeddings`.

    Attributes:
      min_rows: Tables with fewer rows are not replaced.
      optimizer: Optimizer of the replaced tables.
      num_shards: Maximum number of shards of a table.
      replace_regularized: Whether layers with a regularizer or a constraint are
        replaced, which then only see the rows of a batch.
    """

    min_rows: int
    optimizer: Any
    num_shards: int
    replace_regularized: bool

    def __post_init__(self):
        _core_checks.check_int("min_rows", self.min_rows, lowest=1)
        _core_checks.check_int("num_shards", self.num_shards, lowest=1)
        if self.optimizer is None:
            raise ValueError(
                "Argument `optimizer` must be the optimizer of the tables: "
                '"model", "sgd", "adagrad", or an optimizer of Keras or of '
                "tf.tpu.experimental.embedding. Received: None."
            )

    @property
    def follows_model(self) -> bool:
        """Whether the tables follow the optimizer of their model."""
        return (
            isinstance(self.optimizer, str)
            and self.optimizer == model_rules.MODEL
        )


def keras_rule(keras: Any, optimizer: Any) -> OptimizerSpec | None:
    """Returns the rule of a Keras SGD or Adagrad, or None for other values.

    Keras adds `epsilon` to the accumulator of Adagrad. In the spec, the initial
    value of the accumulator contains it.

    Args:
      keras: The module of the Keras version.
      optimizer: Optimizer of this version, its name, or another object.

    Raises:
      TypeError: If it is another Keras optimizer.
      ValueError: If a setting would not apply to a table.
    """
    if isinstance(optimizer, str):
        name = _core_checks.check_one_of(
            "optimizer", optimizer, (model_rules.MODEL, "sgd", "adagrad")
        )
        if name == model_rules.MODEL:
            return None
        optimizer = {
            "sgd": keras.optimizers.SGD,
            "adagrad": keras.optimizers.Adagrad,
        }[name]()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return None
    kind = type(optimizer)
    if kind not in (keras.optimizers.SGD, keras.optimizers.Adagrad):
        raise TypeError(
            "A separate Keras optimizer of the tables must be SGD or Adagrad, "
            "because other optimizers of Keras change all rows at every step; "
            'use optimizer="model" and compile the model with this optimizer, '
            "or use an optimizer of tf.tpu.experimental.embedding, which "
            "change only the rows of the batch. Received: "
            f"{kind.__name__}."
        )
    used = {
        name: getattr(optimizer, name)
        for name in (*OTHER_SETTINGS, "momentum")
        if getattr(optimizer, name, None)
    }
    if used:
        raise ValueError(
            "The optimizer of the tables supports only a learning rate and "
            "Adagrad's initial_accumulator_value and epsilon. Received: "
            + ", ".join(f"{name}={value!r}" for name, value in used.items())
            + "."
        )
    rate = optimizer.get_config()["learning_rate"]
    if isinstance(rate, dict):
        rate = keras.optimizers.schedules.deserialize(rate)
    if kind is keras.optimizers.SGD:
        return OptimizerSpec("sgd", rate)
    initial = optimizer.initial_accumulator_value + optimizer.epsilon
    return OptimizerSpec(
        "adagrad", rate, slots=(SlotSpec("accumulators", initial),)
    )


class ReplacedLayer(EmbeddingCore):
    """A mixin for a stock `Embedding` that has become a `ShardedEmbedding`."""

    _table = None
    _key_table = None
    _has_shard_arguments = False
    # Function that returns the class of replaced layers for the value
    # "replaced_class" of `get_config`.
    _saved_class: Callable[[Any], type]
    # Whether the table is created only to hold the rows of the stock weight.
    _is_converting = False

    def _set_up(self, optimizer: Any, num_shards: int) -> None:
        """Sets the attributes of a `ShardedEmbedding`."""
        self.supports_jit = False
        self.num_shards = min(num_shards, self.input_dim)
        self.optimizer = optimizer
        vars(optimizer)["row_constraint"] = self.embeddings_constraint

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Creates a layer from the result of `get_config`."""
        config = dict(config)
        kind = cls._saved_class(config.pop("replaced_class"))
        optimizer = config["optimizer"]
        if isinstance(optimizer, dict):
            optimizer = cls._keras.saving.deserialize_keras_object(optimizer)
        return kind(**{**config, "optimizer": optimizer})

    def _table_initializer(self) -> Any:
        # The rows of the stock weight are assigned after the conversion.
        return tf.zeros if self._is_converting else super()._table_initializer()


def class_of_replaced_layers(stock: type, replaced: type, keras: Any) -> type:
    """Returns a class of replaced layers that has the name of `stock`.

    Args:
      stock: The stock class, `Embedding` or a subclass.
      replaced: The class of replaced `Embedding` layers, which `from_config`
        creates for all of these classes.
      keras: The module of the Keras version.
    """
    is_subclass = stock is not keras.layers.Embedding
    kind = type(
        stock.__name__,
        (stock, replaced) if is_subclass else (replaced,),
        {
            "__module__": replaced.__module__,
            "__doc__": stock.__doc__,
            "_replaced_class": stock,
        },
    )
    # `from_config` of any of these classes creates the class that was saved.
    return keras.saving.register_keras_serializable(
        "tf_layoutmap", replaced.__name__
    )(kind)


class Replacer:
    """Replaces the `Embedding` layers of one Keras version."""

    # The module of the Keras version.
    keras: Any
    # Functions that return the known subclasses of `Embedding` whose methods
    # may be overridden.
    known_classes: tuple[Any, ...] = ()

    def __init__(self, settings: Settings):
        """Checks the optimizer by creating one.

        Raises:
          TypeError, ValueError: If the optimizer is not supported.
        """
        self.settings = settings
        self.new_optimizer("tables")

    # The parts of one Keras version.

    def new_optimizer(self, layer: str) -> Any:
        """Returns a new optimizer for the table of a layer."""
        raise NotImplementedError

    def differences(self) -> Iterable[str]:
        """Yields differences of a separate optimizer from Keras' optimizer."""
        raise NotImplementedError

    def weight_of(self, layer: Any) -> Any | None:
        """Returns the weight of a stock layer, or None before it is built."""
        raise NotImplementedError

    def own_reason(self, layer: Any) -> str | None:
        """Returns a reason of this Keras version not to replace a layer."""
        raise NotImplementedError

    def report_rule(self, kind: str) -> str:
        """Returns the `stock_rule` of a report for an optimizer class."""
        return {"SGD": "rows", "Adagrad": "adagrad"}.get(kind, "adam")

    def is_without_effect(self, rule: Any) -> bool:
        """Returns whether a regularizer changes no gradient."""
        del rule
        return False

    def convert(self, layer: Any) -> None:
        """Replaces a layer in place."""
        raise NotImplementedError

    def models_of(self, layers: list[Any]) -> list[Any]:
        """Returns the models among layers."""
        return [
            layer for layer in layers if isinstance(layer, self.keras.Model)
        ]

    def is_optimizer_built(self, optimizer: Any) -> bool:
        """Returns whether an optimizer has created slot variables."""
        raise NotImplementedError

    # Decisions.

    def is_candidate(self, layer: Any) -> bool:
        """Returns whether a layer is an `Embedding` that is not replaced."""
        return isinstance(layer, self.keras.layers.Embedding) and (
            not hasattr(layer, "_replaced_class")
        )

    def reason_against(self, layer: Any, layers: list[Any]) -> str | None:
        """Returns why a layer is not replaced, or None if it is replaced.

        Args:
          layer: A stock layer.
          layers: All layers of the model.
        """
        if layer.input_dim < self.settings.min_rows:
            return f"it has fewer than min_rows={self.settings.min_rows:,} rows"
        reason = self._class_reason(type(layer)) or self.own_reason(layer)
        if reason:
            return reason
        if layer.variable_dtype != "float32":
            return (
                f"its table has the dtype {layer.variable_dtype}; a table with "
                "an optimizer is float32"
            )
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return (
                "a strategy with several replicas is in scope; use "
                "tlm.layers.TPUEmbedding"
            )
        return self._rules_reason(layer) or self._sharing_reason(layer, layers)

    def _class_reason(self, kind: type) -> str | None:
        stock = self.keras.layers.Embedding
        for base in kind.__mro__[: kind.__mro__.index(stock)]:
            if f"{base.__module__}.{base.__qualname__}" in self.known_classes:
                continue
            methods = sorted(_METHODS & vars(base).keys())
            if methods:
                return f"its class {base.__name__} overrides {methods}"
        return None

    def _rules_reason(self, layer: Any) -> str | None:
        for name in ("regularizer", "constraint"):
            rule = getattr(layer, f"embeddings_{name}")
            if rule is None or self.is_without_effect(rule):
                continue
            if not self.settings.replace_regularized:
                return (
                    f"its embeddings_{name} reads the full table at every "
                    "step; with replace_regularized=True the layer is "
                    f"replaced, and the {name} is applied to the rows of a "
                    "batch"
                )
            if name == "constraint":
                try:
                    tables.check_by_row(rule, layer.name)
                except ValueError:
                    return (
                        "its embeddings_constraint computes norms of columns, "
                        "which depend on all rows"
                    )
        return None

    def _sharing_reason(self, layer: Any, layers: list[Any]) -> str | None:
        weight = self.weight_of(layer)
        if weight is None:
            return None
        for other in layers:
            if other is layer:
                continue
            if any(
                other_weight is weight for other_weight in own_weights(other)
            ):
                return (
                    "its weight is also a weight of layer "
                    f"{other.name!r}, which would keep the old table"
                )
        return None

    def _differences_of(self, layer: Any, compiled: Any) -> Iterable[str]:
        if not self.settings.follows_model:
            yield from self.differences()
            yield from self._differences_from(compiled)
        elif compiled is None:
            yield (
                "With an optimizer other than SGD without momentum and "
                "Adagrad, rows that a step does not look up are not updated; "
                "Keras' optimizers update all rows."
            )
        else:
            yield from model_rules.differences(self.keras, compiled)
        for name in ("regularizer", "constraint"):
            rule = getattr(layer, f"embeddings_{name}")
            if rule is not None and not self.is_without_effect(rule):
                yield (
                    f"Each embeddings_{name} is applied to the rows of a "
                    "batch, not to the full table."
                )

    def _differences_from(self, compiled: Any) -> Iterable[str]:
        """Yields differences from the optimizer of a compiled model."""
        if compiled is None:
            return
        kind = type(compiled).__name__
        if kind != self.rule_name:
            yield (
                f"The model's optimizer is {kind}; the replaced tables are "
                f"trained with {self.new_optimizer('tables')._spec.name}."
            )
        else:
            yield from self._other_rate(compiled)
        for name in (*OTHER_SETTINGS, "momentum"):
            value = getattr(compiled, name, None)
            if value:
                yield (
                    f"{name}={value} of the model's optimizer does not apply "
                    "to the replaced tables."
                )

    def _other_rate(self, compiled: Any) -> Iterable[str]:
        table_rate = self.new_optimizer("tables").get_config()["learning_rate"]
        rate = compiled.get_config()["learning_rate"]
        is_equal = (
            abs(table_rate - rate) <= 1e-6 * abs(rate)
            if isinstance(table_rate, float | int)
            and isinstance(rate, float | int)
            else table_rate == rate
        )
        if not is_equal:
            yield (
                "The learning rate of the replaced tables is "
                f"{_text(table_rate)}, and of the model's optimizer "
                f"{_text(rate)}."
            )

    # Replacement.

    def entry(
        self, layer: Any, reason: str | None, compiled: Any = None
    ) -> EmbeddingEntry:
        """Returns the entry of a stock layer for the report.

        Args:
          layer: The layer.
          reason: Reason not to replace it, or None.
          compiled: The optimizer of the compiled model, or None.
        """
        rule = self.rule_name if compiled is None else type(compiled).__name__
        table = 4 * layer.input_dim * layer.output_dim
        num_slots = self._num_slots(compiled)
        before = table * (1 + _STOCK_SLOTS.get(rule, 2))
        return EmbeddingEntry(
            path=getattr(layer, "path", None) or layer.name,
            kind=type(layer).__name__,
            num_rows=layer.input_dim,
            dim=layer.output_dim,
            is_replaced=reason is None,
            reason=reason or "",
            differences=()
            if reason
            else tuple(dict.fromkeys(self._differences_of(layer, compiled))),
            bytes_before=before,
            bytes_after=before if reason else table * (1 + num_slots),
            rule_source="" if reason else self._rule_source(layer, compiled),
        )

    def _rule_source(self, layer: Any, compiled: Any) -> Any:
        """Returns the rule of a table, or a function that returns it.

        Args:
          layer: The stock layer, which may be replaced later.
          compiled: The optimizer of the compiled model, or None.
        """
        if not self.settings.follows_model:
            return self.new_optimizer("tables").describe()
        expected = (
            UNKNOWN_RULE
            if compiled is None
            else f"{model_rules.describe(compiled)} (the model's optimizer)"
        )
        reference = weakref.ref(layer)

        def describe() -> str:
            optimizer = getattr(reference(), "optimizer", None)
            rule = UNKNOWN_RULE if optimizer is None else optimizer.describe()
            return expected if rule == UNKNOWN_RULE else rule

        return describe

    def _num_slots(self, compiled: Any) -> int:
        """Returns the number of slot variables of a replaced table."""
        if not self.settings.follows_model:
            return len(self.new_optimizer("tables")._spec.slots)
        # Adam has the largest number of slot variables of common optimizers.
        return max(
            (
                len(model_rules.read_rule(self.keras, inner, "tables").slots)
                for inner in model_rules.inner_optimizers(compiled)
            )
            if compiled is not None
            else [2]
        )

    @functools.cached_property
    def rule_name(self) -> str:
        """Class name of the Keras optimizer with the rule of the tables."""
        if self.settings.follows_model:
            return "Adam"
        name = self.new_optimizer("tables")._spec.name
        return {"sgd": "SGD", "adagrad": "Adagrad"}.get(name, "Adam")

    def replace(
        self,
        model: Any,
        *,
        dry_run: bool,
        ids_per_step: int = 2048,
        plan: Callable[[EmbeddingReport], Any] | None = None,
    ) -> EmbeddingReport:
        """Replaces the layers of a model and returns the report.

        Args:
          model: A model or layer.
          dry_run: Whether only the report is computed.
          ids_per_step: See `EmbeddingReport`.
          plan: Function that returns a plan for the layers of a
            report, or None to replace all layers that can be replaced.

        Raises:
          ValueError: If an optimizer has slot variables of a replaced table.
        """
        layers = list(model._flatten_layers())
        models = self.models_of(layers)
        optimizer = getattr(model, "optimizer", None)
        rule = self.rule_name if optimizer is None else type(optimizer).__name__
        report = EmbeddingReport(
            stock_rule=self.report_rule(rule), ids_per_step=ids_per_step
        )
        candidates = [layer for layer in layers if self.is_candidate(layer)]
        if self.settings.follows_model and optimizer is not None:
            for inner in model_rules.inner_optimizers(optimizer):
                model_rules.read_rule(
                    self.keras, inner, f"model {model.name!r}"
                )
        for layer in candidates:
            reason = self.reason_against(layer, layers)
            report.entries.append(self.entry(layer, reason, optimizer))
        if plan is not None:
            report.memory_plan = made = plan(report)
            for index, (layer, choice) in enumerate(
                zip(candidates, made.choices.values())
            ):
                if report.entries[index].is_replaced and choice == STOCK:
                    report.entries[index] = self.entry(
                        layer, _PLANNED_REASON, optimizer
                    )
        chosen = [
            layer
            for layer, entry in zip(candidates, report.entries)
            if entry.is_replaced
        ]
        if dry_run or not chosen:
            return report
        self._check_optimizers(models, chosen)
        for layer in chosen:
            self.convert(layer)
        for changed_model in models:
            reset_functions(changed_model)
        return report

    def _check_optimizers(self, models: list[Any], chosen: list[Any]) -> None:
        if all(self.weight_of(layer) is None for layer in chosen):
            return
        for model in models:
            optimizer = getattr(model, "optimizer", None)
            if optimizer is not None and self.is_optimizer_built(optimizer):
                raise ValueError(
                    "`shard_embeddings` must be called before the model is "
                    "trained, or after `compile` with a new optimizer: the "
                    f"optimizer {optimizer.name!r} of model {model.name!r} has "
                    "slot variables for the tables that would be replaced. "
                    "Call `model.compile` with a new optimizer, then "
                    "`shard_embeddings`. The new optimizer starts with its "
                    "initial state."
                )


def _text(rate: Any) -> str:
    return f"{rate:.6g}" if isinstance(rate, float) else str(rate)


def own_weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer without the weights of its sublayers."""
    return [
        *getattr(layer, "_trainable_variables", ()),
        *getattr(layer, "_non_trainable_variables", ()),
        *getattr(layer, "_trainable_weights", ()),
        *getattr(layer, "_non_trainable_weights", ()),
    ]


def reset_functions(model: Any) -> None:
    """Discards traced functions of a model, which contain the old weights."""
    for name in (
        "train_function",
        "test_function",
        "predict_function",
        "train_tf_function",
    ):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def free_variable(variable: Any) -> None:
    """Frees the memory of a replaced variable by assigning zero rows.

    A function that was traced with the old variable then raises an error for
    each id instead of reading old values.
    """
    shape = [0, *variable.shape[1:]]
    tf.raw_ops.AssignVariableOp(
        resource=strategies.handle_of(variable),
        value=tf.zeros(shape, variable.dtype),
        validate_shape=False,
    )
