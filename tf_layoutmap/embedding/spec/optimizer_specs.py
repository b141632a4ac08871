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

from tf_layoutmap.embedding.spec.optimizer_readers import (
    READERS,
    Settings,
    SlotSpec,
    read_modifiers,
)

# What a TPU optimizer has and a Keras optimizer of the same class name lacks.
_MARKS = (
    "learning_rate",
    "use_gradient_accumulation",
    "clip_weight_min",
    "clip_gradient_min",
    "weight_decay_factor",
)


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """One update rule, as the engine knows it.

    Attributes:
      name: The engine's name of the rule, as `"adagrad_momentum"`.
      learning_rate: A finite number of at least 0, or a callable without
        arguments that gives one.
      slots: The slot variables, in the order the engine takes them.
      constants: What follows the learning rate in the hyperparameters: those
        of the rule, then all modifiers if there are any.
      accumulates: Whether the gradients of a row are summed before its step.
    """

    name: str
    learning_rate: float | Callable[[], Any]
    slots: tuple[SlotSpec, ...] = ()
    constants: tuple[float, ...] = ()
    accumulates: bool = True

    @property
    def has_dynamic_rate(self) -> bool:
        """Whether the learning rate is asked for at every update."""
        return callable(self.learning_rate)


def read_optimizer(
    optimizer: Any,
    *,
    table: str,
    takes_slot_fn: bool = False,
) -> OptimizerSpec | None:
    """Reads one `tf.tpu.experimental.embedding` optimizer.

    Args:
      optimizer: An instance of `SGD`, `Adagrad`, `AdagradMomentum`, `Adam` or
        `FTRL`, or of one of `host_optimizers`, or None. Never changed. Or
        what this function has returned before.
      table: Name of the table it is for, used in errors.
      takes_slot_fn: Whether `slot_variable_creation_fn` may be set.

    Returns:
      The frozen rule; None for None.

    Raises:
      ValueError: If the class is not a TPU optimizer, or one of its settings
        is invalid or not carried out by the engine.
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
    if not all(hasattr(optimizer, mark) for mark in _MARKS):
        raise ValueError(
            f"{type(optimizer)} is an unsupported optimizer class; pass an "
            "instance of a class of tf.tpu.experimental.embedding, such as "
            f"SGD or Adagrad {where}."
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
            "The host engine creates slot variables itself, with the shards "
            f"of their table; `slot_variable_creation_fn` of {kind} must be "
            f"None. Received: {optimizer.slot_variable_creation_fn!r} "
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


def _check_combinations(optimizer: Any, spec: OptimizerSpec, where: str):
    """Raises for settings that are fine alone and not together."""
    if (
        spec.name == "adam"
        and not optimizer.lazy_adam
        and (not optimizer.use_gradient_accumulation)
    ):
        raise ValueError(
            "Adam with lazy_adam=False moves each row once per step, so it "
            "must have use_gradient_accumulation=True. Received: "
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
    """Raises for a schedule that needs a step, which it would not get."""
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
