"""Optimizer steps on rows, computed with stock ops of TensorFlow.

The kernels of this package run on CPUs. On a mesh of GPUs or TPUs,
`row_updates` applies these rules instead. docs/ops.md lists the hyperparameters
and slot variables of each rule, and the headers in cc/core/optimizers contain
its source.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# A rule gets rows, their slot rows, their gradients, the learning rate and the
# constants that follow the learning rate. It returns new rows and slot rows.
_Rows = tuple[Any, list[Any]]
_Rule = Callable[[Any, Sequence[Any], Any, Any, Sequence[float]], _Rows]


def _sgd(p: Any, slots: Any, g: Any, lr: Any, constants: Any) -> _Rows:
    del slots, constants
    return p - lr * g, []


def _momentum(p: Any, slots: Any, g: Any, lr: Any, constants: Any) -> _Rows:
    mu, use_nesterov = constants
    m = mu * slots[0] + lr * g
    return p - (mu * m + lr * g if use_nesterov else m), [m]


def _adagrad(p: Any, slots: Any, g: Any, lr: Any, constants: Any) -> _Rows:
    del constants
    a = slots[0] + g * g
    return p - lr * g / tf.sqrt(a), [a]


def _adagrad_momentum(
    p: Any, slots: Any, g: Any, lr: Any, constants: Any
) -> _Rows:
    mu, use_nesterov, exponent, beta_2, epsilon = constants
    a, m = slots
    a = a + g * g if beta_2 == 1 else beta_2 * a + (1 - beta_2) * (g * g)
    s = (
        g / tf.sqrt(a + epsilon)
        if exponent == 2
        else g * tf.pow(a + epsilon, -1 / exponent)
    )
    m = mu * m + s
    return p - lr * (mu * m + s if use_nesterov else m), [a, m]


def _adam(p: Any, slots: Any, g: Any, lr: Any, constants: Any) -> _Rows:
    beta_1, beta_2, epsilon, sum_inside_sqrt, _ = constants
    m = beta_1 * slots[0] + (1 - beta_1) * g
    v = beta_2 * slots[1] + (1 - beta_2) * (g * g)
    root = (
        tf.sqrt(v + epsilon * epsilon)
        if sum_inside_sqrt
        else tf.sqrt(v) + epsilon
    )
    return p - lr * m / root, [m, v]


def _ftrl(p: Any, slots: Any, g: Any, lr: Any, constants: Any) -> _Rows:
    power, l1, l2, beta, multiply_linear_by_lr = constants
    a, linear = slots
    new_a = a + g * g
    root = tf.pow(new_a, -power)
    sigma = root - tf.pow(a, -power)
    if multiply_linear_by_lr:
        linear += lr * g - sigma * p
        threshold = lr * l1 + tf.zeros_like(p)
        quotient = root + beta + 2 * lr * l2
    else:
        linear += g - sigma / lr * p
        threshold = l1 + tf.zeros_like(p)
        quotient = (root + beta) / lr + 2 * l2
    pulled = tf.where(linear < 0, -threshold, threshold) - linear
    p = tf.where(tf.abs(linear) > threshold, pulled / quotient, 0.0)
    return p, [new_a, linear]


def _rmsprop(p: Any, slots: Any, g: Any, lr: Any, constants: Any) -> _Rows:
    rho, epsilon = constants
    v = rho * slots[0] + (1 - rho) * (g * g)
    return p - lr * g / tf.sqrt(v + epsilon), [v]


# Each rule, and the number of its constants.
_RULES: dict[str, tuple[_Rule, int]] = {
    "sgd": (_sgd, 0),
    "momentum": (_momentum, 2),
    "adagrad": (_adagrad, 0),
    "adagrad_momentum": (_adagrad_momentum, 5),
    "adam": (_adam, 5),
    "ftrl": (_ftrl, 5),
    "rmsprop": (_rmsprop, 2),
}


@dataclasses.dataclass(frozen=True)
class _Modifiers:
    """The modifiers of docs/ops.md, with their default values."""

    clip_gradient_min: float = -math.inf
    clip_gradient_max: float = math.inf
    weight_decay: float = 0.0
    multiply_weight_decay_by_lr: float = 0.0
    clip_weight_min: float = -math.inf
    clip_weight_max: float = math.inf
    accumulate: float = 1.0


class RowRule:
    """One optimizer step on rows.

    Attributes:
      updates_all_rows: Whether a step also updates rows without a gradient.
    """

    def __init__(self, name: str, constants: Sequence[float]):
        """Creates the rule.

        Args:
          name: Name of the rule in docs/ops.md.
          constants: Hyperparameters that follow the learning rate, including
            the modifiers if there are any.

        Raises:
          NotImplementedError: If a step must apply the gradients of equal ids
            one after the other.
        """
        self._rule, count = _RULES[name]
        self._constants = constants[:count]
        self._modifiers = _Modifiers(*constants[count:])
        self.updates_all_rows = name == "adam" and not self._constants[4]
        if not self._modifiers.accumulate:
            raise NotImplementedError(
                "On a mesh of GPUs or TPUs, a table with an optimizer must sum "
                "the gradients of equal ids. Received: "
                f"use_gradient_accumulation=False (optimizer {name!r}). Use "
                "use_gradient_accumulation=True, or a mesh of CPUs."
            )

    def apply(
        self, rows: Any, slots: Sequence[Any], gradients: Any, lr: Any
    ) -> list[Any]:
        """Returns the new rows, followed by the new slot rows.

        Args:
          rows: float32 tensor of any shape.
          slots: Slot rows, each with the shape of `rows`.
          gradients: Summed gradients of the rows, with the shape of `rows`.
          lr: Learning rate, float32, `[]`.
        """
        modifiers = self._modifiers
        low, high = modifiers.clip_gradient_min, modifiers.clip_gradient_max
        gradients = _clipped(gradients, low, high)
        rows, new_slots = self._rule(
            rows, slots, gradients, lr, self._constants
        )
        if decay := modifiers.weight_decay:
            by_rate = modifiers.multiply_weight_decay_by_lr
            rows -= rows * (decay * lr if by_rate else decay)
        low, high = modifiers.clip_weight_min, modifiers.clip_weight_max
        return [_clipped(rows, low, high), *new_slots]


def _clipped(x: Any, low: float, high: float) -> Any:
    if low > -math.inf:
        x = tf.maximum(x, low)
    return tf.minimum(x, high) if high < math.inf else x
