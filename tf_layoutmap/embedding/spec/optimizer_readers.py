"""The numbers of TensorFlow's TPU optimizer objects, checked.

Pure: objects are read by their attributes. Each reader gives the slot
variables of a rule and the constants that follow its learning rate, in the
order of docs/ops.md.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """One slot variable: its name and the value its rows start with.

    It is shaped like the table, or `[num_rows, 1]` if it `is_per_row`.
    """

    name: str
    initial_value: float
    is_per_row: bool = False

    def dim(self, table_dim: int) -> int:
        """Returns its number of columns."""
        return 1 if self.is_per_row else table_dim


class Settings:
    """Reads the attributes of one optimizer object.

    Attributes:
      kind: Name of its class.
      where: Which table it is for, as messages end.
    """

    def __init__(self, optimizer: Any, where: str):
        """Takes the object, which is never changed."""
        self._optimizer = optimizer
        self.kind = type(optimizer).__name__
        self.where = where

    def number(
        self, name: str, requirement: str, holds: Callable[[float], bool]
    ) -> float:
        """Returns a finite number for which `holds` is true.

        Raises:
          ValueError: If it is something else; `requirement` is told.
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
        """Whether the attribute is something else than None."""
        return getattr(self._optimizer, name) is not None

    def flag(self, name: str) -> float:
        """Returns 0 or 1 for a bool; None is False, as TensorFlow has it."""
        value = getattr(self._optimizer, name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(
                f"`{name}` of {self.kind} must be a bool. Received: "
                f"{name}={value!r} {self.where}."
            )
        return float(bool(value))

    def limits(self, low: str, high: str) -> tuple[float, float]:
        """Returns two limits; one that is None is infinite.

        Raises:
          ValueError: If one is no number, or they leave nothing between.
        """
        found: list[float] = []
        for name, unset in ((low, -math.inf), (high, math.inf)):
            value = getattr(self._optimizer, name)
            value = unset if value is None else value
            if not _is_number(value) or math.isnan(value):
                raise ValueError(
                    f"`{name}` of {self.kind} must be a number or None. "
                    f"Received: {name}={value!r} {self.where}."
                )
            found.append(float(value))
        if found[0] > found[1]:
            raise ValueError(
                f"`{low}` of {self.kind} must not be above `{high}`. "
                f"Received: {found[0]} and {found[1]} {self.where}."
            )
        return found[0], found[1]


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


# By class name, so that a subclass, which may mean another rule, has none.
READERS: dict[str, Callable[[Settings], Rule]] = {
    "SGD": _read_sgd,
    "Adagrad": _read_adagrad,
    "AdagradMomentum": _read_adagrad_momentum,
    "Adam": _read_adam,
    "FTRL": _read_ftrl,
    # Those of ours, which a TPU does not have.
    "RowwiseAdagrad": _read_rowwise_adagrad,
    "LAMB": _read_lamb,
}


def read_modifiers(settings: Settings) -> tuple[float, ...]:
    """Returns what goes around the rule; empty if nothing does.

    Raises:
      ValueError: If a setting is no number, or two contradict each other.
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
