"""Whether all processes of a mesh are about to take the same step.

A step on a mesh over several processes is one program in all of them. A batch
of another size in one, or no batch at all, would make them wait for each other
without end; another model, optimizer or batch would train something that
nobody asked for, without an error. So before each step they tell each other
what they are going to do, and refuse together.
"""

# DOC-MERGE: Which step a process is about to take, and telling the others about it.
# DOC-MERGE: The epoch of `fit` that this thread is in, and how it ends for others.
# DOC-MERGE: Batches of which several processes take the same part.
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layout.mesh import pinning, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.processes import compare, digest, messages
from tf_layoutmap.layout.processes.messages import ProcessError


def batch_leaves(batch: Any) -> list[tuple[str, Any]]:
    """Returns path and value of each tensor of a batch, None included."""
    return [
        (
            "/".join(map(str, path)) or "0",
            None
            if x is None or isinstance(x, tf.experimental.Optional)
            else x
            if hasattr(x, "shape")
            else np.asarray(x),
        )
        for path, x in keras.tree.flatten_with_path(batch)
    ]


def local_part(batch: Any, size: int) -> Any:
    """Returns the first `size` samples of a batch."""
    return keras.tree.map_structure(
        lambda x: (
            x
            if x is None or isinstance(x, tf.experimental.Optional)
            else x[:size]
        ),
        batch,
    )


# Of this thread: `step`, the number of the last one in this epoch; `awaited`,
# the `ProcessChecks` whose next message the others wait for; `is_stopped`,
# whether all processes ended the epoch together.
state = threading.local()


@contextlib.contextmanager
def of_epoch(original: Callable[..., Any], data: Any) -> Iterator[None]:
    """`catch_stop_iteration` of Keras: all steps of one epoch are inside.

    Keras counts steps where it knows how many there are, and then asks for no
    further batch: the others are told here that there is none.
    """
    before = (getattr(state, "step", None), getattr(state, "awaited", None))
    state.step, state.awaited, state.is_stopped = 0, None, False
    try:
        with original(data):
            try:
                yield
            except StopIteration:
                # Keras would take it for data that ended too early, and
                # tf_keras train no further epoch.
                if not state.is_stopped:
                    raise
        if state.awaited is not None:
            state.awaited.announce(messages.ENDED)
    except BaseException as error:
        if state.awaited is not None:
            state.awaited.announce(messages.FAILED, messages.first_line(error))
        raise
    finally:
        state.step, state.awaited = before


dtensor = tf.experimental.dtensor

# What TensorFlow says of a step that was ended from elsewhere.
_ABORTED = "Collective ops is aborted by:"


class StepExchange:
    """One kind of step of a model, and what processes say about it."""

    def __init__(
        self, model: Any, mesh: Mesh, batch_dim: str | None, kind: str
    ):
        self.model = model
        self.mesh = mesh
        self.batch_dim = batch_dim
        self.kind = kind
        self.step = 0
        self.is_on = messages.is_possible(mesh)

    def count_step(self) -> None:
        """Counts from 1 within an epoch; elsewhere, within this object."""
        if getattr(state, "step", None) is None:
            self.step += 1
        else:
            self.step = state.step = state.step + 1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Goes around a step; when it fails, no other waits in its own.

        Raises:
          ProcessError: The step of another process failed.
        """
        if not self.is_on:
            yield
            return
        try:
            yield
        except Exception as error:
            awaited, state.awaited = state.awaited, None
            if _ABORTED in str(error):
                raise ProcessError(
                    "Another process failed and ended "
                    f"{self.here()} of this one, {dtensor.client_id()}: "
                    f"{_why_aborted(error)} Start all processes again, from a "
                    "checkpoint."
                ) from error
            if awaited is not None:
                messages.fail(messages.first_line(error))
            raise

    def exchange(self, kind: str, body: Any, what: str) -> list[Any]:
        """Returns what all processes send; see `messages.exchange`."""
        try:
            return messages.exchange(kind, body, what)
        except ProcessError:
            # The others know, or are told by the message of this exchange.
            state.awaited = None
            raise

    def announce(self, kind: str, why: str = "") -> None:
        """Tells the others that this process takes no further step."""
        state.awaited = None
        # The process that keeps the messages may have ended already.
        with contextlib.suppress(tf.errors.OpError):
            messages.send(kind, why)

    def here(self) -> str:
        """Returns which step this is, for messages."""
        return f"step {self.step} of {compare.DOES[self.kind]}"

    def refuse(self, difference: str | None) -> None:
        """Raises a ProcessError if the processes differ."""
        if difference is None:
            return
        state.awaited = None
        raise ProcessError(
            f"The processes that train model {self.model.name!r} do not do "
            f"the same, at {self.here()}: {difference}."
        )


def _why_aborted(error: Exception) -> str:
    line = str(error).partition(_ABORTED)[2].partition("\n")[0]
    return line.rpartition("Error reported from ")[2].strip(" .") + "."


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
    checks.check_type("every_step", every_step, bool, "a bool")
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
        leaves = batch_leaves(batch)
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
            batch = local_part(batch, size)
        if self._is_full or size is not None:
            self._compare_contents(batch_leaves(batch))
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
                    transfer.layout_of_batch(
                        x.shape, self.mesh, self.batch_dim
                    ),
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
