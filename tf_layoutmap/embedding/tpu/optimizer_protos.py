"""What the TPU calls the optimizers: their proto fields and operations.

Pure but for `tf.raw_ops`. The fields are those of TensorFlow's
`optimization_parameters.proto`; numbers go in as the user gave them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Of GradientAccumulationStatus.
_ENABLED, _DISABLED = 1, 2


@dataclasses.dataclass(frozen=True)
class Rule:
    """One optimizer as the TPU knows it.

    Attributes:
      op_name: What its load and retrieve operations are called after.
      slots: Its slot variables, in the order of these operations.
      write: Sets the fields that only this optimizer has.
    """

    op_name: str
    slots: tuple[str, ...]
    write: Callable[[Any, Any], None]

    @property
    def load(self) -> Callable[..., Any]:
        """The operation that sends a shard to the TPU."""
        return getattr(tf.raw_ops, f"LoadTPUEmbedding{self.op_name}Parameters")

    @property
    def retrieve(self) -> Callable[..., Any]:
        """The operation that brings a shard back."""
        return getattr(
            tf.raw_ops, f"RetrieveTPUEmbedding{self.op_name}Parameters"
        )


def rule_of(optimizer: Any) -> Rule:
    """Returns the rule of an optimizer that `read_optimizer` let through."""
    return _RULES[type(optimizer).__name__]


def write_parameters(
    parameters: Any,
    optimizer: Any,
    learning_rates: list[Callable[[], Any]],
):
    """Writes one optimizer into an `OptimizationParameters` proto.

    Args:
      parameters: The proto, empty.
      optimizer: An optimizer of `tf.tpu.experimental.embedding`.
      learning_rates: The dynamic learning rates; a position is a tag.
    """
    rate = optimizer.learning_rate
    if callable(rate):
        parameters.learning_rate.dynamic.tag = learning_rates.index(rate)
    else:
        parameters.learning_rate.constant = rate
    parameters.gradient_accumulation_status = (
        _ENABLED if optimizer.use_gradient_accumulation else _DISABLED
    )
    _write_limits(
        parameters,
        "clipping_limits",
        optimizer.clip_weight_min,
        optimizer.clip_weight_max,
    )
    _write_limits(
        parameters,
        "gradient_clipping_limits",
        optimizer.clip_gradient_min,
        optimizer.clip_gradient_max,
    )
    if optimizer.weight_decay_factor:
        parameters.weight_decay_factor = optimizer.weight_decay_factor
        if optimizer.multiply_weight_decay_factor_by_learning_rate:
            parameters.multiply_weight_decay_factor_by_learning_rate = True
    # The optimizer has a bool and the proto an enum of the same two numbers;
    # protobuf 7.34 takes no bool for it.
    parameters.low_dimensional_packing_status = int(
        bool(optimizer.low_dimensional_packing_status)
    )
    rule_of(optimizer).write(parameters, optimizer)


def write_quantization(parameters: Any, quantization: Any):
    """Writes a `QuantizationConfig` into an `OptimizationParameters`."""
    found = parameters.simulated_quantization
    found.enabled = True
    found.num_buckets = quantization.num_buckets
    found.clipping_limits.lower.value = quantization.lower
    found.clipping_limits.upper.value = quantization.upper


def _write_limits(parameters, field: str, lower, upper):
    # A limit that is not set must not make the field appear.
    if lower is not None:
        getattr(parameters, field).lower.value = lower
    if upper is not None:
        getattr(parameters, field).upper.value = upper


def _write_sgd(parameters, optimizer):
    del optimizer
    parameters.stochastic_gradient_descent.SetInParent()


def _write_adagrad(parameters, optimizer):
    del optimizer
    parameters.adagrad.SetInParent()


def _write_adagrad_momentum(parameters, optimizer):
    found = parameters.adagrad_momentum
    found.momentum = optimizer.momentum
    found.use_nesterov = optimizer.use_nesterov
    found.exponent = optimizer.exponent
    found.beta2 = optimizer.beta2
    found.epsilon = optimizer.epsilon


def _write_adam(parameters, optimizer):
    found = parameters.adam
    found.beta1 = optimizer.beta_1
    found.beta2 = optimizer.beta_2
    found.epsilon = optimizer.epsilon
    found.use_non_lazy_adam = not optimizer.lazy_adam
    found.use_sum_inside_sqrt = optimizer.sum_inside_sqrt


def _write_ftrl(parameters, optimizer):
    found = parameters.ftrl
    found.l1 = optimizer.l1_regularization_strength
    found.l2 = optimizer.l2_regularization_strength
    found.lr_power = optimizer.learning_rate_power
    found.beta = optimizer.beta
    found.multiply_linear_by_lr = optimizer.multiply_linear_by_learning_rate
    found.allow_zero_accumulator = optimizer.allow_zero_accumulator


_RULES = {
    "SGD": Rule("StochasticGradientDescent", (), _write_sgd),
    "Adagrad": Rule("Adagrad", ("accumulators",), _write_adagrad),
    "AdagradMomentum": Rule(
        "AdagradMomentum", ("accumulators", "momenta"), _write_adagrad_momentum
    ),
    "Adam": Rule("ADAM", ("momenta", "velocities"), _write_adam),
    "FTRL": Rule("FTRL", ("accumulators", "linears"), _write_ftrl),
}
