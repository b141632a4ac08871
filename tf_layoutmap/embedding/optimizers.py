"""Reads TensorFlow's TPU optimizer objects into frozen specs.

Pure: the objects are read by their attributes, TensorFlow is not imported.
A setting the engine does not carry out is refused here, never ignored:
training with another rule than the one asked for would only show in the
numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

# What a TPU optimizer has and a Keras optimizer of the same class name lacks.
_MARKS = ("learning_rate", "use_gradient_accumulation", "clip_weight_min",
          "clip_gradient_min", "weight_decay_factor")


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """One slot variable: its name and the value its rows start with."""

    name: str
    initial_value: float


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """One update rule, as the engine knows it.

    Attributes:
      name: The engine's name of the rule, `"sgd"` or `"adagrad"`.
      learning_rate: A finite number of at least 0, or a callable without
        arguments that gives one.
      slots: The slot variables, in the order the engine takes them.
      constants: What follows the learning rate in the hyperparameters.
    """

    name: str
    learning_rate: float | Callable[[], Any]
    slots: tuple[SlotSpec, ...] = ()
    constants: tuple[float, ...] = ()

    @property
    def has_dynamic_rate(self) -> bool:
        """Whether the learning rate is asked for at every update."""
        return callable(self.learning_rate)


def read_optimizer(optimizer: Any, *, table: str) -> OptimizerSpec | None:
    """Reads one `tf.tpu.experimental.embedding` optimizer.

    Args:
      optimizer: An instance of `SGD` or `Adagrad`, or None. Never changed.
      table: Name of the table it is for, used in errors.

    Returns:
      The frozen rule; None for None.

    Raises:
      ValueError: If the class is not a TPU optimizer, or one of its settings
        is invalid or not carried out by the engine.
    """
    if optimizer is None:
        return None
    kind = type(optimizer).__name__
    where = f"(table {table!r})"
    if not all(hasattr(optimizer, mark) for mark in _MARKS):
        raise ValueError(
            f"{type(optimizer)} is an unsupported optimizer class; pass an "
            "instance of a class of tf.tpu.experimental.embedding, such as "
            f"SGD or Adagrad {where}.")
    reader = _READERS.get(kind)
    if reader is None:
        raise ValueError(
            f"The host engine supports the optimizers {sorted(_READERS)}. "
            f"Received: {kind} {where}.")
    _refuse_unsupported_settings(optimizer, kind, where)
    return reader(optimizer, _read_learning_rate(optimizer, where), where)


def _refuse_unsupported_settings(optimizer: Any, kind: str, where: str):
    """Raises for each setting that would change the numbers.

    `low_dimensional_packing_status` only lays out a TPU's memory, so it is
    not looked at.
    """
    if not optimizer.use_gradient_accumulation:
        raise ValueError(
            "The host engine sums the gradients of a row before its one "
            f"update; {kind} must have use_gradient_accumulation=True. "
            f"Received: use_gradient_accumulation=False {where}.")
    unset = {
        "clip_weight_min": optimizer.clip_weight_min,
        "clip_weight_max": optimizer.clip_weight_max,
        "clipvalue": (getattr(optimizer, "clip_gradient_min", None),
                      getattr(optimizer, "clip_gradient_max", None)),
        "slot_variable_creation_fn": getattr(
            optimizer, "slot_variable_creation_fn", None),
    }
    for name, value in unset.items():
        if value is not None and value != (None, None):
            raise ValueError(
                f"The host engine does not support `{name}` of {kind} yet; "
                f"leave it out. Received: {name}={value!r} {where}.")
    if optimizer.weight_decay_factor:
        raise ValueError(
            "The host engine does not support `weight_decay_factor` of "
            f"{kind} yet; leave it out. Received: weight_decay_factor="
            f"{optimizer.weight_decay_factor!r} {where}.")


def _read_learning_rate(optimizer: Any, where: str):
    rate = optimizer.learning_rate
    if callable(rate):
        _check_takes_no_arguments(rate, where)
        return rate
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise ValueError(
            "A learning rate must be a number or a callable without "
            f"arguments. Received: learning_rate={rate!r} {where}.")
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(
            "A learning rate must be finite and at least 0. "
            f"Received: learning_rate={rate!r} {where}.")
    return float(rate)


def _check_takes_no_arguments(rate: Callable[..., Any], where: str):
    """Raises for a schedule that wants a step: nobody would pass it one."""
    try:
        signature = inspect.signature(rate)
    except (TypeError, ValueError):  # Built-ins may have none.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ValueError(
            "A dynamic learning rate must be a callable without arguments; "
            "wrap a schedule as `lambda: schedule(step_variable)`. Received: "
            f"learning_rate={rate!r}, which takes {signature} {where}."
        ) from error


def _read_sgd(optimizer: Any, rate: Any, where: str) -> OptimizerSpec:
    del optimizer, where
    return OptimizerSpec("sgd", rate)


def _read_adagrad(optimizer: Any, rate: Any, where: str) -> OptimizerSpec:
    initial = float(optimizer.initial_accumulator_value)
    if not (math.isfinite(initial) and initial > 0):
        raise ValueError(
            "`initial_accumulator_value` of Adagrad must be finite and "
            f"above 0. Received: {initial!r} {where}.")
    return OptimizerSpec(
        "adagrad", rate, slots=(SlotSpec("accumulators", initial),))


_READERS = {"SGD": _read_sgd, "Adagrad": _read_adagrad}
