"""What the optimizers of the host engine have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LearningRate = float | Callable[[], Any]


class HostOptimizer:
    """What these optimizers have in common: the options around a rule.

    The attributes are those of TensorFlow's TPU optimizers.
    """

    slot_variable_creation_fn = None  # The engine creates them.

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
        """Keeps the settings; `TPUEmbedding` refuses invalid ones.

        Args:
          learning_rate: A number, or a callable without arguments.
          use_gradient_accumulation: False: one step per looked-up id instead
            of one for their sum.
          clip_weight_min: The lowest value of a row after its step.
          clip_weight_max: The highest.
          weight_decay_factor: After the rule, `p -= factor * p`.
          multiply_weight_decay_factor_by_learning_rate: Whether the factor is
            times the learning rate.
          clipvalue: What each value of the summed gradient is clipped to:
            `(low, high)`, or one number for both sides.
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
