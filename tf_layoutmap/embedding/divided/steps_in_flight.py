"""The steps of one embedding between `enqueue` and `apply_gradients`.

What a process knows of a step are tensors of the function being traced.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_layoutmap.embedding.step import step_queues


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch on its way.

    Attributes:
      plan: Of `PlanExchange`.
      requests: By process, the rows that it wants of this one.
      sizes: `[processes, processes, 4]` int64: by sender and owner, those of
        `PlanExchange`.
      num_samples: By process and feature, `[num_features]` int64 each: the
        activations whose gradients this process gets.
    """

    plan: tf.Tensor
    requests: list[tf.Tensor]
    sizes: tf.Tensor
    num_samples: list[tf.Tensor]


class StepsInFlight(step_queues.StepQueues[Step]):
    """Queues of steps, one for each function that is traced."""

    def __init__(self):
        """Starts without steps."""
        super().__init__(
            "With tables that are divided among processes, the calls of a "
            "step are made in one tf.function."
        )
