"""The rules with which tables follow the optimizer of their model.

`read_rule` finds the rule of the engine that computes the same step as an
optimizer of Keras 3 or tf_keras. `describe` returns the name, the learning rate
and the other settings of an optimizer as text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import strategies
from tf_layoutmap.embedding.configs.optimizer_specs import (
    OptimizerSpec,
    SlotSpec,
)

# Value of the argument `optimizer` of a layer that follows the optimizer of its
# model.
MODEL = "model"

# Settings of an optimizer that change the gradient of a table.
CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


@dataclasses.dataclass(frozen=True)
class ModelRule:
    """The rule of the engine for an optimizer class of Keras.

    Attributes:
      name: Name of the rule.
      slots: The slot variables.
      constants: Function that returns the hyperparameters that follow the
        learning rate. It is called in each traced step, because programs may
        change the attributes of an optimizer.
      rate_factor: Function that returns a factor of the learning rate, see
        `_weight_error`.
      corrects_bias: Whether the learning rate includes Adam's bias correction.
      squares: Whether the rule squares gradients. Keras 3 then squares each
        gradient of a repeated id separately.
      moves_all_rows: Whether the optimizer also moves rows without a gradient.
    """

    name: str
    slots: tuple[SlotSpec, ...]
    constants: Callable[[Any], list[float]]
    rate_factor: Callable[[Any], float] = lambda _: 1.0
    corrects_bias: bool = False
    squares: bool = False
    moves_all_rows: bool = False

    def spec(self, optimizer: Any) -> OptimizerSpec:
        """Returns the rule as a spec whose learning rate is not used."""
        return OptimizerSpec(
            self.name, 0.0, self.slots, tuple(self.constants(optimizer))
        )

    def hyperparameters(
        self, optimizer: Any, learning_rate: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Returns the hyperparameters of a step, float32.

        Args:
          optimizer: The optimizer whose rule this is.
          learning_rate: Float32 scalar.
          step: Number of the step, float32, 1 in the first step.
        """
        if self.corrects_bias:
            of_m = 1 - tf.pow(tf.cast(optimizer.beta_1, tf.float32), step)
            of_v = 1 - tf.pow(tf.cast(optimizer.beta_2, tf.float32), step)
            learning_rate = learning_rate * tf.sqrt(of_v) / of_m
        learning_rate = learning_rate * self.rate_factor(optimizer)
        return tf.stack([learning_rate, *self.constants(optimizer)])


def _weight_error(decay: float) -> float:
    """Returns the engine's weight of a new value divided by Keras' weight.

    In a moving average, a new value has the weight `1 - decay`. The engine
    computes it from a float32, and Keras from a float64. For 0.999, the results
    differ by 1.3e-5. The slot variables of the engine therefore contain this
    constant factor, and the rules below divide updates by it.
    """
    return (1 - float(np.float32(decay))) / (1 - decay)


_MOMENTA = (SlotSpec("momenta", 0.0),)
_MOMENTA_AND_VELOCITIES = (*_MOMENTA, SlotSpec("velocities", 0.0))


def _sgd(optimizer: Any) -> ModelRule:
    if not optimizer.momentum:
        return ModelRule("sgd", (), lambda _: [])
    return ModelRule(
        "momentum",
        _MOMENTA,
        lambda rule: [float(rule.momentum), float(rule.nesterov)],
        moves_all_rows=True,
    )


def _adagrad(optimizer: Any) -> ModelRule:
    # Keras adds `epsilon` to the accumulator in each step. Here, the initial
    # value of the accumulator contains it.
    initial = optimizer.initial_accumulator_value + optimizer.epsilon
    return ModelRule(
        "adagrad",
        (SlotSpec("accumulators", initial),),
        lambda _: [],
        squares=True,
    )


def _adam(optimizer: Any) -> ModelRule:
    _require(optimizer, "amsgrad", False)
    return ModelRule(
        "adam",
        _MOMENTA_AND_VELOCITIES,
        lambda rule: [
            float(rule.beta_1),
            float(rule.beta_2),
            float(rule.epsilon) * math.sqrt(_weight_error(rule.beta_2)),
            0.0,  # Keras adds `epsilon` to the root, not to its argument.
            1.0,  # Only rows with a gradient are updated.
        ],
        rate_factor=lambda rule: (
            math.sqrt(_weight_error(rule.beta_2)) / _weight_error(rule.beta_1)
        ),
        corrects_bias=True,
        squares=True,
        moves_all_rows=True,
    )


def _rmsprop(optimizer: Any) -> ModelRule:
    _require(optimizer, "momentum", 0.0)
    _require(optimizer, "centered", False)
    return ModelRule(
        "rmsprop",
        (SlotSpec("velocities", 0.0),),
        lambda rule: [
            float(rule.rho),
            float(rule.epsilon) * _weight_error(rule.rho),
        ],
        rate_factor=lambda rule: math.sqrt(_weight_error(rule.rho)),
        squares=True,
        moves_all_rows=True,
    )


def _ftrl(optimizer: Any) -> ModelRule:
    _require(optimizer, "l2_shrinkage_regularization_strength", 0.0)
    initial = float(optimizer.initial_accumulator_value)
    return ModelRule(
        "ftrl",
        (
            SlotSpec("accumulators", initial),
            SlotSpec("linears", 0.0),
        ),
        lambda rule: [
            float(rule.learning_rate_power),
            float(rule.l1_regularization_strength),
            float(rule.l2_regularization_strength),
            float(rule.beta),
            0.0,  # The linears are not multiplied by the learning rate.
        ],
        squares=True,
        moves_all_rows=True,
    )


def _lamb(optimizer: Any) -> ModelRule:
    del optimizer
    return ModelRule(
        "lamb",
        (*_MOMENTA_AND_VELOCITIES, SlotSpec("steps", 0.0, is_per_row=True)),
        lambda rule: [
            float(rule.beta_1),
            float(rule.beta_2),
            float(rule.epsilon),
            0.0,  # The weight decay is applied before the step, as in Keras.
        ],
        moves_all_rows=True,
    )


# The keys are names of classes. Subclasses are not supported, because a
# subclass can implement another rule.
_READERS: dict[str, Callable[[Any], ModelRule]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
    "Ftrl": _ftrl,
    "Lamb": _lamb,
}
_CHOICES = (
    "SGD, Adagrad, Adam, AdamW (both without amsgrad), RMSprop (without "
    "momentum and centered), Ftrl (without l2_shrinkage) and Lamb"
)


class _UnsupportedSettingError(ValueError):
    """A setting for which the engine has no rule."""


def _require(optimizer: Any, name: str, value: Any) -> None:
    setting = getattr(optimizer, name, value)
    if setting != value:
        raise _UnsupportedSettingError(
            f"{type(optimizer).__name__} with {name}={setting!r}"
        )


def read_rule(keras: Any, optimizer: Any, where: str) -> ModelRule:
    """Returns the rule of a table that follows an optimizer.

    Args:
      keras: The module of the Keras version.
      optimizer: Optimizer of a model.
      where: The table, for messages.

    Raises:
      ValueError: If the engine has no rule for this optimizer. The message
        contains the supported optimizers.
    """
    name = type(optimizer).__name__
    received = name
    if type(optimizer) is getattr(keras.optimizers, name, None):
        reader = _READERS.get(name)
        if reader is not None:
            try:
                rule = reader(optimizer)
            except _UnsupportedSettingError as error:
                received = str(error)
            else:
                return rule
    raise ValueError(
        'A table with optimizer="model" follows the optimizer of its model, '
        f"which must be one of these classes of {keras.__name__}, not a "
        f"subclass: {_CHOICES}. Received: {received} ({where}). Compile the "
        "model with one of them, or pass a separate optimizer for the table: "
        "an object of tf.tpu.experimental.embedding, such as Adam(0.001) or "
        'Adagrad(0.1), or "sgd" or "adagrad".'
    )


def differences(keras: Any, optimizer: Any) -> Iterator[str]:
    """Yields sentences about tables that follow an optimizer.

    Each sentence describes a difference from a stock `Embedding`.

    Args:
      keras: The module of the Keras version.
      optimizer: A supported optimizer, or a wrapper of one.
    """
    for inner in inner_optimizers(optimizer):
        name = type(inner).__name__
        rule = read_rule(keras, inner, "tables")
        decays = bool(getattr(inner, "weight_decay", None))
        if rule.moves_all_rows or decays:
            yield (
                f"With {name}{' and weight_decay' * decays}, rows that a step "
                "does not look up are not updated; Keras updates all rows."
            )
        if (
            rule.squares
            and strategies.on_servers()
            and keras.__name__ == "keras"
        ):
            yield (
                "On parameter servers, the gradients of an id that occurs "
                "several times in a step are summed before they are squared; "
                "Keras 3 squares each of them."
            )
        if rule.name == "lamb":
            yield (
                "Lamb scales the update of each row by the norm of the row; "
                "Keras uses the norm of the full table."
            )
        if getattr(inner, "use_ema", False):
            yield (
                f"use_ema of {name} averages the other weights only; tables "
                "keep their current rows."
            )


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Returns the optimizers in a `LossScaleOptimizer` or `MultiOptimizer`.

    Args:
      optimizer: The optimizer of a model. If it is not a wrapper, the result
        contains the optimizer itself.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return inner_optimizers(inner)
    several = getattr(optimizer, "optimizers", None)
    return [optimizer] if not several else list(several)


def describe(optimizer: Any) -> str:
    """Returns an optimizer as text, such as `Adam, learning rate 0.001`.

    Args:
      optimizer: An optimizer of Keras, or a wrapper of one.
    """
    return " or ".join(
        _describe(inner) for inner in inner_optimizers(optimizer)
    )


def _describe(optimizer: Any) -> str:
    parts = [type(optimizer).__name__, describe_rate(optimizer.get_config())]
    for name in ("momentum", "weight_decay", *CLIPPING):
        value = getattr(optimizer, name, None)
        if value:
            parts.append(f"{name}={value:g}")
    return ", ".join(parts)


def describe_rate(config: Any) -> str:
    """Returns the learning rate of an optimizer as text.

    Args:
      config: The result of `get_config` of an optimizer of Keras.
    """
    rate = config.get("learning_rate")
    if isinstance(rate, dict):
        return f"learning rate of {rate.get('class_name', 'a function')}"
    try:
        return f"learning rate {float(rate):.6g}"
    except (TypeError, ValueError):
        return f"learning rate {rate}"
