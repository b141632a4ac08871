"""Whether all processes of a mesh are about to take the same step.

A step on a mesh over several processes is one program in all of them. A batch
of another size in one, or no batch at all, would make them wait for each other
without end; another model, optimizer or batch would train something that
nobody asked for, without an error. So before each step they tell each other
what they are going to do, and refuse together.
"""

import warnings
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.layout.mesh import batches, pinning
from tf_layoutmap.layout.processes import (
    compare,
    digest,
    messages,
    shared_batches,
)
from tf_layoutmap.layout.processes.epoch import state
from tf_layoutmap.layout.processes.messages import ProcessError
from tf_layoutmap.layout.processes.step_exchange import StepExchange

_options = {"every_step": False}


class UnevenDataWarning(UserWarning):
    """Processes were given batches of different sizes or numbers."""


def set_process_checks(
    *,
    every_step: bool = False,
    deadline_seconds: float = messages.DEADLINE_SECONDS,
) -> None:
    """Sets what the processes of a mesh compare, and how long they wait.

    In every process before each step of `fit`, `evaluate` and `predict`: which
    step it is, the structure, dtypes and sizes of its batch, and how often
    weights were set from outside of a step. Before the first step of a model
    also names, shapes and layouts of its weights, some of their values,
    optimizer, loss, and the values of batches that processes share.

    >>> import tf_layoutmap as tlm
    >>> tlm.distribution.set_process_checks(deadline_seconds=60)

    Args:
      every_step: Whether all of it is compared before each step. The same in
        all processes.
      deadline_seconds: How long a process is waited for before a step.

    Raises:
      TypeError: `every_step` is no bool.
      ValueError: `deadline_seconds` is no number above 0.
    """
    _checks.check_type("every_step", every_step, bool, "a bool")
    messages.set_deadline(deadline_seconds)
    _options["every_step"] = every_step


class ProcessChecks(StepExchange):
    """What the processes tell each other about one kind of step of a model.

    On a mesh of one process it does nothing.
    """

    # Whether the model was not compared yet; whether all of it is compared
    # before this step.
    _is_new = True
    _is_full = True

    def next_batch(self, iterator: Any) -> Any:
        """Returns the next batch, cut to what all processes have.

        Raises:
          StopIteration: This process, or another, has no further one.
          ProcessError: Another process does something else.
        """
        if not self.is_on:
            return next(iterator)
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self.announce(messages.ENDED)
            raise
        except Exception as error:
            self.announce(messages.FAILED, messages.first_line(error))
            raise
        return self.agreed(batch)

    def agreed(self, batch: Any) -> Any:
        """Returns a batch, cut to what all processes have; as above."""
        if not self.is_on or any(map(pinning.on_mesh, tf.nest.flatten(batch))):
            return batch
        self._is_full = self._is_new or _options["every_step"]
        state.awaited = self
        self.count_step()
        leaves = shared_batches.leaves(batch)
        message = {
            "kind": self.kind,
            "step": self.step,
            "is_full": self._is_full,
            "times_set": digest.times_set(self.model),
            "batch": digest.of_batch(leaves),
        }
        size = compare.batch_size(message["batch"])
        if self.batch_dim is not None and (
            size is None or size % self.mesh.dim_size(self.batch_dim)
        ):
            # It would be replicated, so all processes must have the same.
            message["contents"] = [
                digest.checksum(np.asarray(x))
                for _, x in leaves
                if x is not None
            ]
        try:
            found = self.exchange("step", message, f"before {self.here()}")
        except messages.ProcessEndedError as error:
            self._stop_with_others(error)
        self.refuse(compare.step_difference(found))
        size = self._common_size(found)
        if size is not None:
            batch = shared_batches.cut(batch, size)
        if self._is_full or size is not None:
            self._compare_contents(shared_batches.leaves(batch))
        return batch

    def compare_model(self) -> None:
        """Compares models and optimizers, once they are built.

        Raises:
          ProcessError: They differ.
        """
        if not self.is_on or not self._is_full:
            return
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        weights = list(model.weights)
        found = self.exchange(
            "model",
            {
                "weight": digest.of_weights(weights),
                "optimizer": digest.of_optimizer(optimizer),
                "loss": digest.of_loss(getattr(model, "loss", None)),
                "values": digest.of_values(
                    weights + digest.variables_of(optimizer)
                ),
            },
            f"comparing model {model.name!r} before {self.here()}",
        )
        for number, other in enumerate(found):
            for kind in ("weight", "optimizer", "loss"):
                self.refuse(
                    compare.list_difference(
                        kind, found[0][kind], other[kind], number
                    )
                )
        self.refuse(
            compare.parts_difference(
                "variable", [other["values"] for other in found]
            )
        )
        self._is_new = False

    def _stop_with_others(self, error: ProcessError) -> NoReturn:
        if self.kind == "predict":
            raise ProcessError(
                f"{error} Give all processes the same number of batches to "
                "predict."
            ) from None
        warnings.warn(
            f"{error} All stop together; the batches that are left "
            "are not used.",
            UnevenDataWarning,
            stacklevel=3,
        )
        self._stop()

    def _stop(self) -> NoReturn:
        state.awaited, state.is_stopped = None, True
        raise StopIteration

    def _common_size(self, found: list[dict[str, Any]]) -> int | None:
        """Returns the samples that all processes take; None for all."""
        sizes = [compare.batch_size(other["batch"]) for other in found]
        if (
            len(set(sizes)) == 1
            and len({str(other.get("contents")) for other in found}) == 1
        ):
            return None
        number = next(
            (n for n, size in enumerate(sizes) if size != sizes[0]), 1
        )
        had = (
            f"process 0 has {sizes[0]} samples and process {number} has "
            f"{sizes[number]}, at {self.here()}"
        )
        known = [size for size in sizes if size is not None]
        if (
            self.kind == "predict"
            or self.batch_dim is None
            or (len(known) < len(sizes))
        ):
            raise ProcessError(
                f"The processes cannot share a batch of which {had}. Give all "
                "of them the same samples."
            )
        parts = self.mesh.dim_size(self.batch_dim)
        size = min(known) // parts * parts
        warnings.warn(
            f"The last samples of a batch are left out, of which {had}: all "
            f"processes take the first {size}, which the batch axis of size "
            f"{parts} divides.",
            UnevenDataWarning,
            stacklevel=3,
        )
        if size == 0:
            self._stop()
        return size

    def _compare_contents(self, leaves: list[tuple[str, Any]]) -> None:
        """Refuses other values in parts that several processes hold."""
        mine = [
            [
                path,
                {}
                if x is None
                else digest.of_contents(
                    x,
                    batches.layout_of_batch(x.shape, self.mesh, self.batch_dim),
                ),
            ]
            for path, x in leaves
        ]
        self.refuse(
            compare.parts_difference(
                "batch",
                self.exchange(
                    "values", mine, f"comparing batches before {self.here()}"
                ),
            )
        )
