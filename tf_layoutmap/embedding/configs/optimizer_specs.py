"""Reads TPU optimizer objects into frozen specs, and defines `HostOptimizer`.

This module does not import TensorFlow. The module only reads the attributes of
optimizer objects. If the engine does not support a setting, this module raises
an error. Without this check, training would silently use a different rule.

Each `_read_*` function returns the slot variables and the constants of a rule.
The constants follow the learning rate in the order that docs/ops.md defines.
`HostOptimizer` is the base class of the optimizers that only the host engine
supports.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from tf_layoutmap._core import checks

if TYPE_CHECKING:
    from tf_layoutmap._core.types import EmbeddingOptimizer


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """Spec of one slot variable: its name and initial value.

    The variable has the shape of the table, or `[num_rows, 1]` if `is_per_row`
    is True.
    """

    name: str
    initial_value: float
    is_per_row: bool = False

    def dim(self, table_dim: int) -> int:
        """Returns the number of columns of the slot variable."""
        return 1 if self.is_per_row else table_dim


class Settings:
    """Reader of the attributes of one optimizer object.

    Attributes:
      kind: Name of the optimizer's class.
      where: Text at the end of error messages, which names the table.
    """

    def __init__(self, optimizer: Any, where: str):
        """Stores `optimizer`, which is not modified."""
        self._optimizer = optimizer
        self.kind = type(optimizer).__name__
        self.where = where

    def number(
        self, name: str, requirement: str, holds: Callable[[float], bool]
    ) -> float:
        """Returns an attribute that must be a finite number.

        Args:
          name: Name of the attribute.
          requirement: Description of the additional condition, for the message.
          holds: Function that returns whether a number meets the condition.

        Raises:
          ValueError: If the attribute is not a finite number, or does not meet
            the condition.
        """
        value = getattr(self._optimizer, name)
        if (
            not _is_number(value)
            or not math.isfinite(value)
            or (not holds(value))
        ):
            raise ValueError(
                f"`{name}` of {self.kind} must be a finite number"
                f"{requirement}. Received: {name}={value!r} {self.where}."
            )
        return float(value)

    def is_set(self, name: str) -> bool:
        """Whether the attribute is not None."""
        return getattr(self._optimizer, name) is not None

    def flag(self, name: str) -> float:
        """Returns a bool attribute as 0 or 1. None is equivalent to False."""
        value = getattr(self._optimizer, name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(
                f"`{name}` of {self.kind} must be a bool. Received: "
                f"{name}={value!r} {self.where}."
            )
        return float(bool(value))

    def limits(self, low: str, high: str) -> tuple[float, float]:
        """Returns two limits. None represents an infinite limit.

        Raises:
          ValueError: If a limit is not a number, or `low` is above `high`.
        """
        bounds: list[float] = []
        for name, unset in ((low, -math.inf), (high, math.inf)):
            value = getattr(self._optimizer, name)
            value = unset if value is None else value
            if not _is_number(value) or math.isnan(value):
                raise ValueError(
                    f"`{name}` of {self.kind} must be a number or None. "
                    f"Received: {name}={value!r} {self.where}."
                )
            bounds.append(float(value))
        if bounds[0] > bounds[1]:
            raise ValueError(
                f"`{low}` of {self.kind} must not be above `{high}`. "
                f"Received: {bounds[0]} and {bounds[1]} {self.where}."
            )
        return bounds[0], bounds[1]


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


def _at_least_0(settings: Settings, name: str) -> float:
    return settings.number(name, " of at least 0", lambda x: x >= 0)


def _above_0(settings: Settings, name: str) -> float:
    return settings.number(name, " above 0", lambda x: x > 0)


def _decay(settings: Settings, name: str) -> float:
    return settings.number(
        name, " of at least 0 and below 1", lambda x: 0 <= x < 1
    )


Rule = tuple[str, tuple[SlotSpec, ...], tuple[float, ...]]


def _read_sgd(settings: Settings) -> Rule:
    del settings
    return "sgd", (), ()


def _read_adagrad(settings: Settings) -> Rule:
    initial = _above_0(settings, "initial_accumulator_value")
    return "adagrad", (SlotSpec("accumulators", initial),), ()


def _read_adagrad_momentum(settings: Settings) -> Rule:
    return (
        "adagrad_momentum",
        (SlotSpec("accumulators", 0.0), SlotSpec("momenta", 0.0)),
        (
            _at_least_0(settings, "momentum"),
            settings.flag("use_nesterov"),
            _above_0(settings, "exponent"),
            settings.number(
                "beta2", " of at least 0 and at most 1", lambda x: 0 <= x <= 1
            ),
            _above_0(settings, "epsilon"),
        ),
    )


def _read_adam(settings: Settings) -> Rule:
    return (
        "adam",
        (SlotSpec("momenta", 0.0), SlotSpec("velocities", 0.0)),
        (
            _decay(settings, "beta_1"),
            _decay(settings, "beta_2"),
            _above_0(settings, "epsilon"),
            settings.flag("sum_inside_sqrt"),
            settings.flag("lazy_adam"),
        ),
    )


def _read_ftrl(settings: Settings) -> Rule:
    initial = (
        _at_least_0 if settings.flag("allow_zero_accumulator") else _above_0
    )(settings, "initial_accumulator_value")
    return (
        "ftrl",
        (SlotSpec("accumulators", initial), SlotSpec("linears", 0.0)),
        (
            settings.number(
                "learning_rate_power", " of at most 0", lambda x: x <= 0
            ),
            _at_least_0(settings, "l1_regularization_strength"),
            _at_least_0(settings, "l2_regularization_strength"),
            _at_least_0(settings, "beta"),
            settings.flag("multiply_linear_by_learning_rate"),
        ),
    )


def _read_rowwise_adagrad(settings: Settings) -> Rule:
    initial = _at_least_0(settings, "initial_accumulator_value")
    return (
        "rowwise_adagrad",
        (SlotSpec("accumulators", initial, is_per_row=True),),
        (_above_0(settings, "epsilon"),),
    )


def _read_lamb(settings: Settings) -> Rule:
    return (
        "lamb",
        (
            SlotSpec("momenta", 0.0),
            SlotSpec("velocities", 0.0),
            SlotSpec("steps", 0.0, is_per_row=True),
        ),
        (
            _decay(settings, "beta_1"),
            _decay(settings, "beta_2"),
            _above_0(settings, "epsilon"),
            _at_least_0(settings, "weight_decay"),
        ),
    )


# The keys are names of classes. Subclasses are not supported, because a
# subclass can implement another rule.
READERS: dict[str, Callable[[Settings], Rule]] = {
    "SGD": _read_sgd,
    "Adagrad": _read_adagrad,
    "AdagradMomentum": _read_adagrad_momentum,
    "Adam": _read_adam,
    "FTRL": _read_ftrl,
    # A TPU does not support these optimizers of this package.
    "RowwiseAdagrad": _read_rowwise_adagrad,
    "LAMB": _read_lamb,
}


def read_modifiers(settings: Settings) -> tuple[float, ...]:
    """Returns constants for clipping, weight decay and accumulation.

    If all of these settings have their default values, the tuple is empty.

    Raises:
      ValueError: If a setting is not a number, or if two settings contradict
        each other.
    """
    clip_gradient = settings.limits("clip_gradient_min", "clip_gradient_max")
    clip_weight = settings.limits("clip_weight_min", "clip_weight_max")
    decay = 0.0
    if settings.is_set("weight_decay_factor"):
        decay = _at_least_0(settings, "weight_decay_factor")
    by_rate = settings.flag("multiply_weight_decay_factor_by_learning_rate")
    accumulate = settings.flag("use_gradient_accumulation")
    unlimited = (-math.inf, math.inf)
    if not accumulate and clip_gradient != unlimited:
        raise ValueError(
            f"`clipvalue` of {settings.kind} must be None with "
            "use_gradient_accumulation=False: the sum that would be clipped "
            f"is never formed. Received: {clip_gradient} {settings.where}."
        )
    if (clip_gradient, clip_weight, decay, accumulate) == (
        unlimited,
        unlimited,
        0.0,
        1.0,
    ):
        return ()
    return (*clip_gradient, decay, by_rate, *clip_weight, accumulate)


# Attributes that distinguish a TPU optimizer from a Keras optimizer with the
# same class name.
_TPU_OPTIMIZER_ATTRIBUTES = (
    "learning_rate",
    "use_gradient_accumulation",
    "clip_weight_min",
    "clip_gradient_min",
    "weight_decay_factor",
)


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """Spec of one update rule in the engine.

    Attributes:
      name: Name of the rule in the engine, such as `"adagrad_momentum"`.
      learning_rate: A finite number of at least 0, or a callable without
        arguments that returns a finite number of at least 0.
      slots: The slot variables, in the order that the engine requires.
      constants: Hyperparameters that follow the learning rate: first the
        constants of the rule, then the return value of `read_modifiers`.
      accumulates: Whether the gradients of a row are summed before the update.
    """

    name: str
    learning_rate: float | Callable[[], Any]
    slots: tuple[SlotSpec, ...] = ()
    constants: tuple[float, ...] = ()
    accumulates: bool = True

    @property
    def has_dynamic_rate(self) -> bool:
        """Whether the learning rate is a callable, which each update calls."""
        return callable(self.learning_rate)


def read_optimizer(
    optimizer: Any,
    *,
    table: str,
    takes_slot_fn: bool = False,
) -> OptimizerSpec | None:
    """Converts an optimizer object to a frozen spec.

    Args:
      optimizer: An `SGD`, `Adagrad`, `AdagradMomentum`, `Adam` or `FTRL` object
        of TensorFlow, an optimizer of `tf_layoutmap.optimizers`, an
        `OptimizerSpec`, or None. The object is not modified.
      table: Name of the table, for messages.
      takes_slot_fn: Whether optimizers with a `slot_variable_creation_fn` are
        accepted.

    Returns:
      The spec, or None if `optimizer` is None.

    Raises:
      ValueError: If `optimizer` is not a supported optimizer, if a setting is
        invalid, or if the engine does not support a setting.
    """
    if optimizer is None or isinstance(optimizer, OptimizerSpec):
        return optimizer
    kind = type(optimizer).__name__
    where = f"(table {table!r})"
    if isinstance(optimizer, type):
        raise ValueError(
            "The optimizer of a table must be an object, such as "
            f"{optimizer.__name__}(learning_rate=0.1). Received: the class "
            f"{optimizer.__name__} {where}."
        )
    if not all(hasattr(optimizer, name) for name in _TPU_OPTIMIZER_ATTRIBUTES):
        raise ValueError(
            unsupported_optimizer(
                optimizer,
                "an object of tf.tpu.experimental.embedding or tlm.optimizers",
                f"table {table!r}",
            )
        )
    reader = READERS.get(kind)
    if reader is None:
        raise ValueError(
            f"The host engine supports the optimizers {sorted(READERS)}. "
            f"Received: {kind} {where}."
        )
    if (
        not takes_slot_fn
        and getattr(optimizer, "slot_variable_creation_fn", None) is not None
    ):
        raise ValueError(
            f"`slot_variable_creation_fn` of {kind} must be None: the host "
            "engine creates slot variables with the same shards as their "
            f"table. Received: {optimizer.slot_variable_creation_fn!r} "
            f"{where}."
        )
    settings = Settings(optimizer, where)
    rate = _read_learning_rate(optimizer, where)
    name, slots, constants = reader(settings)
    spec = OptimizerSpec(
        name,
        rate,
        slots,
        constants + read_modifiers(settings),
        bool(settings.flag("use_gradient_accumulation")),
    )
    _check_combinations(optimizer, spec, where)
    return spec


# The class of each name, for messages.
_NAMES = {
    name.lower(): f"tf.tpu.experimental.embedding.{name}"
    for name in ("SGD", "Adagrad", "AdagradMomentum", "Adam", "FTRL")
}


def unsupported_optimizer(optimizer: Any, accepted: str, where: str) -> str:
    """Returns the message for a value that is not an embedding optimizer.

    >>> unsupported_optimizer("adamw", "an embedding optimizer", "table 'ads'")
    "Argument `optimizer` must be an embedding optimizer, \
such as tf.tpu.experimental.embedding.Adam(learning_rate=0.001). Received: \
optimizer='adamw' (table 'ads')."

    Args:
      optimizer: Received value.
      accepted: Values that are accepted.
      where: The table or layer.
    """
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    name = name.replace("_", "").lower()
    (near,) = difflib.get_close_matches(name, _NAMES, n=1) or ["adagrad"]
    return checks.message(
        "optimizer",
        f"{accepted}, such as {_NAMES[near]}(learning_rate=0.001)",
        optimizer,
        where,
    )


def _check_combinations(optimizer: Any, spec: OptimizerSpec, where: str):
    """Raises a ValueError if settings contradict each other."""
    if (
        spec.name == "adam"
        and not optimizer.lazy_adam
        and (not optimizer.use_gradient_accumulation)
    ):
        raise ValueError(
            "Adam with lazy_adam=False must have "
            "use_gradient_accumulation=True, because it updates each row once "
            "per step. Received: "
            f"use_gradient_accumulation=False {where}."
        )
    if (
        spec.name == "ftrl"
        and spec.learning_rate == 0
        and (not optimizer.multiply_linear_by_learning_rate)
    ):
        raise ValueError(
            "FTRL divides by its learning rate, which must be above 0 unless "
            "multiply_linear_by_learning_rate=True. Received: "
            f"learning_rate={spec.learning_rate} {where}."
        )


def _read_learning_rate(optimizer: Any, where: str):
    rate = optimizer.learning_rate
    if callable(rate):
        _check_takes_no_arguments(rate, where)
        return rate
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise ValueError(
            "A learning rate must be a number or a callable without "
            f"arguments. Received: learning_rate={rate!r} {where}."
        )
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(
            "A learning rate must be finite and at least 0. "
            f"Received: learning_rate={rate!r} {where}."
        )
    return float(rate)


def _check_takes_no_arguments(rate: Callable[..., Any], where: str):
    """Raises a ValueError if a callable has required arguments."""
    try:
        signature = inspect.signature(rate)
    # Some built-in functions have no signature.
    except (TypeError, ValueError):
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ValueError(
            "A dynamic learning rate must be a callable without arguments; "
            "wrap a schedule as `lambda: schedule(step_variable)`, or pass it "
            "with the argument `optimizer` of tlm.layers.TPUEmbedding, which "
            "counts the updates. Received: "
            f"learning_rate={rate!r}, which takes {signature} {where}."
        ) from error


LearningRate = float | Callable[[], Any]


TableOptimizer: TypeAlias = "EmbeddingOptimizer | OptimizerSpec"
"""The optimizer of a table, as an object or as its spec."""


class HostOptions(TypedDict, total=False):
    """Arguments that all optimizers of the host engine have."""

    use_gradient_accumulation: bool
    clip_weight_min: float | None
    clip_weight_max: float | None
    weight_decay_factor: float | None
    multiply_weight_decay_factor_by_learning_rate: bool | None
    clipvalue: float | tuple[float | None, float | None] | None


class HostOptimizer:
    """Base class of optimizers that only the host engine supports.

    A `HostOptimizer` has all attributes that TensorFlow's TPU optimizers have
    in common.
    """

    slot_variable_creation_fn = None  # Unused by the engine.

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        use_gradient_accumulation: bool = True,
        clip_weight_min: float | None = None,
        clip_weight_max: float | None = None,
        weight_decay_factor: float | None = None,
        multiply_weight_decay_factor_by_learning_rate: bool | None = None,
        clipvalue: float | tuple[float | None, float | None] | None = None,
    ):
        """Stores the settings, which `TPUEmbedding` checks later.

        Args:
          learning_rate: A number, or a callable without arguments.
          use_gradient_accumulation: Whether a step updates a row once with the
            sum of its gradients. If False, a step updates a row once for each
            id.
          clip_weight_min: Minimum of the values of a row after its update.
          clip_weight_max: Maximum of the values of a row after its update.
          weight_decay_factor: Factor of the weight decay `p -= factor * p`. The
            weight decay is applied after the update rule.
          multiply_weight_decay_factor_by_learning_rate: Whether
            `weight_decay_factor` is multiplied by the learning rate.
          clipvalue: Range `(low, high)` to which each value of the summed
            gradient is clipped. A single number represents the range
            `(-number, number)`.
        """
        self.learning_rate = learning_rate
        self.use_gradient_accumulation = use_gradient_accumulation
        self.clip_weight_min = clip_weight_min
        self.clip_weight_max = clip_weight_max
        self.weight_decay_factor = weight_decay_factor
        self.multiply_weight_decay_factor_by_learning_rate = (
            multiply_weight_decay_factor_by_learning_rate
        )
        if isinstance(clipvalue, tuple):
            self.clip_gradient_min, self.clip_gradient_max = clipvalue
        elif clipvalue is None:
            self.clip_gradient_min = self.clip_gradient_max = None
        else:
            self.clip_gradient_min = -clipvalue
            self.clip_gradient_max = clipvalue
