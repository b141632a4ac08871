"""Checks before each step that all processes of a mesh run the same step.

If a mesh spans several processes, all of them must run the same step together.
If the batch of one process is missing or has a different size, the processes
wait for each other forever. If a model, optimizer or batch differs, training
gives wrong results without an error. Processes therefore exchange a description
of each step, and all of them raise the same error if the descriptions differ.

`set_process_checks` sets the options. `ProcessChecks` runs the checks for one
kind of step of a model, and shortens batches to a size that all processes have.
`epoch_scope` reports the end of an epoch to the other processes.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, user_warnings
from tf_layoutmap.layout.mesh import errors, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.processes import compare, digest, messages
from tf_layoutmap.layout.processes.messages import ProcessError


def batch_leaves(batch: Any) -> list[tuple[str, Any]]:
    """Returns the path and value of each tensor of a batch, including None."""
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


def first_samples(batch: Any, size: int) -> Any:
    """Returns the first `size` samples of a batch."""
    return keras.tree.map_structure(
        lambda x: (
            x
            if x is None or isinstance(x, tf.experimental.Optional)
            else x[:size]
        ),
        batch,
    )


# State of this thread. `step` is the number of the last step in this epoch. The
# other processes wait for the next message of the `ProcessChecks` object
# `awaited`. `is_stopped` records whether all processes ended the epoch
# together.
state = threading.local()


@contextlib.contextmanager
def epoch_scope(original: Callable[..., Any], data: Any) -> Iterator[None]:
    """Wraps `catch_stop_iteration` of Keras, which encloses an epoch's steps.

    If the number of steps of an epoch is known, Keras does not try to read a
    batch after the last step, so the data does not signal the end of the epoch.
    This function then reports the end of the epoch to the other processes.

    Raises:
      TypeError: If the data contains a tensor that a dataset cannot contain.
    """
    before = (getattr(state, "step", None), getattr(state, "awaited", None))
    state.step, state.awaited, state.is_stopped = 0, None, False
    try:
        with original(data):
            try:
                with errors.explain_batch_error():
                    yield
            except StopIteration:
                # The exception is not passed to Keras. Otherwise Keras would
                # warn that the data ended too early, and tf_keras would not
                # train the next epoch.
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

# If another process aborts a step, TensorFlow's error contains this text.
_ABORTED = "Collective ops is aborted by:"


class StepExchange:
    """Exchanges messages about the steps of a model with other processes."""

    def __init__(
        self, model: Any, mesh: Mesh, batch_dim: str | None, kind: str
    ):
        self.model = model
        self.mesh = mesh
        self.batch_dim = batch_dim
        self.kind = kind
        self.step = 0
        self.is_enabled = messages.is_possible(mesh)

    def count_step(self) -> None:
        """Increments the number of the step, which starts at 1 in each epoch.

        Outside of epochs, each object has its own counter.
        """
        if getattr(state, "step", None) is None:
            self.step += 1
        else:
            self.step = state.step = state.step + 1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs a step in the context; reports its failure to other processes.

        Raises:
          ProcessError: If the step of another process failed.
        """
        if not self.is_enabled:
            yield
            return
        try:
            yield
        except Exception as error:
            awaited, state.awaited = state.awaited, None
            if _ABORTED in str(error):
                raise ProcessError(
                    f"Another process failed and aborted {self.here()} of "
                    f"process {dtensor.client_id()}: {_why_aborted(error)} "
                    "Restart all processes from a checkpoint."
                ) from error
            if awaited is not None:
                messages.report_failure(messages.first_line(error))
            raise

    def exchange(self, kind: str, body: Any, what: str) -> list[Any]:
        """Returns the messages of all processes; see `messages.exchange`."""
        try:
            return messages.exchange(kind, body, what)
        except ProcessError:
            # The other processes also raise an error in this exchange, so no
            # further message is sent to them.
            state.awaited = None
            raise

    def announce(self, kind: str, why: str = "") -> None:
        """Reports to the other processes that this process has stopped."""
        state.awaited = None
        # The error is ignored, because the process that stores the messages may
        # have ended already.
        with contextlib.suppress(tf.errors.OpError):
            messages.send(kind, why)

    def here(self) -> str:
        """Returns the number and kind of the step, for messages."""
        return f"step {self.step} of {compare.ACTIVITIES[self.kind]}"

    def raise_on_difference(self, difference: str | None) -> None:
        """Raises `ProcessError` if there is a difference between processes."""
        if difference is None:
            return
        state.awaited = None
        raise ProcessError(
            f"All processes of model {self.model.name!r} must run the same "
            f"step. Received at {self.here()}: {difference}."
        )


def _why_aborted(error: Exception) -> str:
    line = str(error).partition(_ABORTED)[2].partition("\n")[0]
    return line.rpartition("Error reported from ")[2].strip(" .") + "."


_options = {"every_step": False}


class UnevenDataWarning(UserWarning):
    """Warning that processes have different sizes or numbers of batches."""


def set_process_checks(
    *,
    every_step: bool = False,
    deadline_seconds: float = messages.DEADLINE_SECONDS,
) -> None:
    """Sets what the processes of a mesh compare, and how long they wait.

    Before each step of `fit`, `evaluate` and `predict`, all processes compare
    the following:

    * the number of the step, and whether it trains, evaluates or predicts;
    * the structure, dtypes and sizes of the batch;
    * how often user code has set weights outside a step.

    Before the first step of a model, the processes also compare the optimizer
    of the model, its loss, the values of batch shards that several processes
    hold, and its weights (names, shapes, layouts and a sample of the values).

    >>> import tf_layoutmap as tlm
    >>> tlm.distribution.set_process_checks(deadline_seconds=60)

    Args:
      every_step: Whether to run all of these comparisons before each step. The
        value must be the same in all processes.
      deadline_seconds: Maximum time, in seconds, to wait for another process
        before a step.

    Raises:
      TypeError: If `every_step` is not a bool.
      ValueError: If `deadline_seconds` is not a number above 0.
    """
    checks.check_type("every_step", every_step, bool, "a bool")
    messages.set_deadline(deadline_seconds)
    _options["every_step"] = every_step


class ProcessChecks(StepExchange):
    """Checks that all processes run the same training, test or predict step.

    On a mesh of one process, the checks do nothing.
    """

    # `_is_new` is true until the model has been compared. `_is_full` is true if
    # the processes compare everything before this step.
    _is_new = True
    _is_full = True

    def next_batch(self, iterator: Any) -> Any:
        """Returns the next batch, shortened to the smallest batch of a process.

        Raises:
          StopIteration: If this process or another process has no further
            batch.
          ProcessError: If another process runs a different step.
        """
        if not self.is_enabled:
            return next(iterator)
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self.announce(messages.ENDED)
            raise
        except Exception as error:
            self.announce(messages.FAILED, messages.first_line(error))
            raise
        return self.common_batch(batch)

    def common_batch(self, batch: Any) -> Any:
        """Returns a batch, shortened to the smallest batch of a process.

        Raises:
          StopIteration: If another process has no further batch.
          ProcessError: If another process runs a different step.
        """
        if not self.is_enabled or any(
            map(tracing.on_mesh, tf.nest.flatten(batch))
        ):
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
            "batch": digest.describe_batch(leaves),
        }
        size = compare.batch_size(message["batch"])
        if self.batch_dim is not None and (
            size is None or size % self.mesh.dim_size(self.batch_dim)
        ):
            # The batch cannot be sharded and will be replicated, so its values
            # must be equal in all processes.
            message["contents"] = [
                digest.checksum(np.asarray(x))
                for _, x in leaves
                if x is not None
            ]
        try:
            received = self.exchange("step", message, f"before {self.here()}")
        except messages.ProcessEndedError as error:
            self._stop_with_others(error)
        self.raise_on_difference(compare.step_difference(received))
        size = self._common_size(received)
        if size is not None:
            batch = first_samples(batch, size)
        if self._is_full or size is not None:
            self._compare_contents(batch_leaves(batch))
        return batch

    def compare_model(self) -> None:
        """Compares models and optimizers after they are built.

        Raises:
          ProcessError: If models or optimizers differ.
        """
        if not self.is_enabled or not self._is_full:
            return
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        weights = list(model.weights)
        received = self.exchange(
            "model",
            {
                "weight": digest.describe_weights(weights),
                "optimizer": digest.describe_optimizer(optimizer),
                "loss": digest.describe_loss(getattr(model, "loss", None)),
                "values": digest.variable_checksums(
                    weights + digest.variables_of(optimizer)
                ),
            },
            f"comparing model {model.name!r} before {self.here()}",
        )
        for number, other in enumerate(received):
            for kind in ("weight", "optimizer", "loss"):
                self.raise_on_difference(
                    compare.list_difference(
                        kind, received[0][kind], other[kind], number
                    )
                )
        self.raise_on_difference(
            compare.parts_difference(
                "variable", [other["values"] for other in received]
            )
        )
        self._is_new = False

    def _stop_with_others(self, error: ProcessError) -> NoReturn:
        if self.kind == "predict":
            raise ProcessError(
                f"{error} Pass the same number of batches to `predict` in all "
                "processes."
            ) from None
        user_warnings.warn(
            f"{error} All processes stop; the remaining batches are not used.",
            UnevenDataWarning,
        )
        self._stop()

    def _stop(self) -> NoReturn:
        state.awaited, state.is_stopped = None, True
        raise StopIteration

    def _common_size(self, received: list[dict[str, Any]]) -> int | None:
        """Returns the number of samples to use; None to use all samples."""
        sizes = [compare.batch_size(other["batch"]) for other in received]
        if (
            len(set(sizes)) == 1
            and len({str(other.get("contents")) for other in received}) == 1
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
                "All processes must have the same samples of a batch. "
                f"Received: {had}. Pass the same samples to all of them."
            )
        parts = self.mesh.dim_size(self.batch_dim)
        size = min(known) // parts * parts
        user_warnings.warn(
            f"The last samples of a batch are not used because {had}. All "
            f"processes use the first {size} samples, a multiple of the size "
            f"of the batch axis ({parts}).",
            UnevenDataWarning,
        )
        if size == 0:
            self._stop()
        return size

    def _compare_contents(self, leaves: list[tuple[str, Any]]) -> None:
        """Raises `ProcessError` if processes have different batch shards."""
        mine = [
            [
                path,
                {}
                if x is None
                else digest.shard_checksums(
                    x,
                    transfer.layout_of_batch(
                        x.shape, self.mesh, self.batch_dim
                    ),
                ),
            ]
            for path, x in leaves
        ]
        self.raise_on_difference(
            compare.parts_difference(
                "batch",
                self.exchange(
                    "values", mine, f"comparing batches before {self.here()}"
                ),
            )
        )
