"""What a weight that takes marks tells of a step that is really taken."""

from typing import Protocol

import tensorflow as tf


class StepTaker(Protocol):
    """The tables of one layer, whose gradients an engine keeps."""

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        ...

    @property
    def table_names(self) -> list[str]:
        """Names of its tables; none if the layer is the table."""
        ...

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the weight that takes the marks of gradients."""
        ...

    @property
    def variable_device(self) -> str:
        """Where that weight is."""
        ...

    @property
    def num_replicas(self) -> int:
        """Replicas that take part in each step."""
        ...

    def apply(self, sum_of_marks: tf.Tensor) -> None:
        """Lets the tables take a step with what came for the weight."""
