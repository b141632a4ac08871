"""Interface of the engines that run the steps of `HostBackend`.

- `HostEngine` runs the steps of one process.
- `WorkerEngine` runs the steps of several processes with copies of all tables.
- `ProcessShardedEngine` runs the steps of several processes with sharded
  tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap.vocabulary import key_rows


class StepEngine(Protocol):
    """Runs the steps of one embedding.

    `HostEngine` documents the methods. Only a `HostEngine` accepts packed
    batches.
    """

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the engine of this process."""
        ...

    # Steps.

    def enqueue(self, replica: int, training: Any, features: Any) -> Any:
        """Enqueues the ids of one step."""

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        ...

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ) -> Any:
        """Applies the gradients of the last dequeued step."""

    def apply_pending(self) -> Any:
        """Applies the pending pipelined update, if any."""

    # Lookups.

    def open(self, replica: int, features: Any) -> Any:
        """Opens a lookup that can receive gradients later."""
        ...

    def look_up(self, replica: int, lookup: Any) -> list[tf.Tensor]:
        """Returns the activations of an open lookup, one per feature."""
        ...

    def follow(
        self, replica: int, lookup: Any, gradients: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Stores the gradients of a lookup until they are applied or expire."""
        ...

    def apply_followed(
        self,
        replica: int,
        marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ) -> Any:
        """Applies the gradients that the marks of all replicas represent."""

    # Calls outside of steps.

    def report_evicted(self, table: int, values: Sequence[Any]) -> None:
        """Calls `on_evict` of one table."""

    def record_restore(self) -> None:
        """Counts a restore, if a step compares it with other processes."""

    def record_write(self, table: int, written: key_rows.RowsToWrite) -> None:
        """Records written rows, if a step compares them."""

    def use_records_of(self, previous: Any) -> None:
        """Uses the records of the engine before a resize."""

    def retire(self, why: str) -> None:
        """Makes all later calls raise an error; an empty reason undoes it."""

    def reset(self) -> Any:
        """Discards all steps in flight."""

    def describe(self) -> dict[str, Any]:
        """Returns the counters and the steps in flight of the engine."""
        ...
