"""A learning rate of tables that follows a schedule of Keras."""

from typing import Any

import tensorflow as tf


class ScheduledRate:
    """A callable without arguments, as a table's optimizer takes it.

    A schedule is a function of a step. The layer that has the tables counts
    its updates, and says where.

    Attributes:
      schedule: The schedule, of either Keras.
      updates: An integer variable; None before the layer is built.
    """

    def __init__(self, schedule: Any):
        """Takes a `keras.optimizers.schedules.LearningRateSchedule`."""
        self.schedule = schedule
        self.updates: tf.Variable | None = None

    def __call__(self) -> tf.Tensor:
        """Returns the rate of the next update, a float32 scalar."""
        step = 0 if self.updates is None else self.updates.read_value()
        return tf.cast(self.schedule(step), tf.float32)
