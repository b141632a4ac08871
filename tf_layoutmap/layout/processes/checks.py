"""Whether all processes of a mesh are about to take the same step.

A step on a mesh over several processes is one program in all of them. A batch
of another size in one, or no batch at all, would make them wait for each other
without end; another model, optimizer or batch would train something that
nobody asked for, without an error. So before each step they tell each other
what they are going to do, and refuse together.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.layout.mesh import batches, pinning
from tf_layoutmap.layout.processes import compare, digest, messages
from tf_layoutmap.layout.processes.messages import ProcessError

dtensor = tf.experimental.dtensor

# What TensorFlow says of a step that was ended from elsewhere.
_ABORTED = "Collective ops is aborted by:"

_state = threading.local()
_options = {"every_step": False}


class UnevenDataWarning(UserWarning):
    """Processes were given batches of different sizes or numbers."""


def set_process_checks(
        *, every_step: bool = False,
        deadline_seconds: float = messages.DEADLINE_SECONDS) -> None:
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


class ProcessChecks:
    """What the processes tell each other about one kind of step of a model.

    On a mesh of one process it does nothing.
    """

    def __init__(self, model: Any, mesh: Any, batch_dim: str | None,
                 verb: str):
        self._model = model
        self._mesh = mesh
        self._batch_dim = batch_dim
        self._verb = verb
        self._step = 0
        self._is_new = True
        self._is_full = True
        self._is_on = messages.is_possible(mesh)

    def next_batch(self, iterator: Any) -> Any:
        """Returns the next batch, cut to what all processes have.

        Raises:
          StopIteration: This process, or another, has no further one.
          ProcessError: Another process does something else.
        """
        if not self._is_on:
            return next(iterator)
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self.announce(messages.ENDED)
            raise
        except Exception as error:
            self.announce(messages.FAILED, _first_line(error))
            raise
        return self.agreed(batch)

    def agreed(self, batch: Any) -> Any:
        """Returns a batch, cut to what all processes have; as above."""
        if not self._is_on or any(map(
                pinning.on_mesh, tf.nest.flatten(batch))):
            return batch
        self._is_full = self._is_new or _options["every_step"]
        _state.awaited = self
        self._count_step()
        leaves = _leaves(batch)
        message = {
            "verb": self._verb, "step": self._step, "is_full": self._is_full,
            "times_set": _times_set(self._model),
            "batch": digest.of_batch(leaves)}
        size = compare.batch_size(message["batch"])
        if self._batch_dim is not None and (
                size is None or size % self._mesh.dim_size(self._batch_dim)):
            # It would be replicated, so all processes must have the same.
            message["contents"] = [digest.checksum(np.asarray(x))
                                   for _, x in leaves if x is not None]
        try:
            found = self._exchange(
                "step", message, f"before {self._here()}")
        except messages.ProcessEndedError as error:
            self._stop_with_others(error)
        self._refuse(compare.step_difference(found))
        size = self._common_size(found)
        if size is not None:
            batch = _cut(batch, size)
        if self._is_full or size is not None:
            self._compare_contents(_leaves(batch))
        return batch

    def _count_step(self) -> None:
        """Counts from 1 within an epoch; elsewhere, within this object."""
        if getattr(_state, "step", None) is None:
            self._step += 1
        else:
            self._step = _state.step = _state.step + 1

    def compare_model(self) -> None:
        """Compares models and optimizers, once they are built.

        Raises:
          ProcessError: They differ.
        """
        if not self._is_on or not self._is_full:
            return
        model = self._model
        optimizer = getattr(model, "optimizer", None)
        weights = list(model.weights)
        found = self._exchange("model", {
            "weight": digest.of_weights(weights),
            "optimizer": digest.of_optimizer(optimizer),
            "loss": digest.of_loss(getattr(model, "loss", None)),
            "values": digest.of_values(
                weights + digest.variables_of(optimizer)),
        }, f"comparing model {model.name!r} before {self._here()}")
        for number, other in enumerate(found):
            for kind in ("weight", "optimizer", "loss"):
                self._refuse(compare.list_difference(
                    kind, found[0][kind], other[kind], number))
        self._refuse(compare.parts_difference(
            "variable", [other["values"] for other in found]))
        self._is_new = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Goes around a step; when it fails, no other waits in its own.

        Raises:
          ProcessError: The step of another process failed.
        """
        if not self._is_on:
            yield
            return
        try:
            yield
        except Exception as error:
            awaited, _state.awaited = _state.awaited, None
            if _ABORTED in str(error):
                raise ProcessError(
                    "Another process failed and ended "
                    f"{self._here()} of this one, {dtensor.client_id()}: "
                    f"{_why_aborted(error)} Start all processes again, from a "
                    "checkpoint.") from error
            if awaited is not None:
                messages.fail(_first_line(error))
            raise

    def _exchange(self, kind: str, body: Any, what: str) -> list[Any]:
        try:
            return messages.exchange(kind, body, what)
        except ProcessError:
            # The others know, or are told by the message of this exchange.
            _state.awaited = None
            raise

    def announce(self, kind: str, why: str = "") -> None:
        """Tells the others that this process takes no further step."""
        _state.awaited = None
        # The process that keeps the messages may have ended already.
        with contextlib.suppress(tf.errors.OpError):
            messages.send(kind, why)

    def _here(self) -> str:
        return f"step {self._step} of {compare.DOES[self._verb]}"

    def _refuse(self, difference: str | None) -> None:
        if difference is None:
            return
        _state.awaited = None
        raise ProcessError(
            f"The processes that train model {self._model.name!r} do not do "
            f"the same, at {self._here()}: {difference}.")

    def _stop_with_others(self, error: ProcessError) -> NoReturn:
        if self._verb == "predict":
            raise ProcessError(
                f"{error} Give all processes the same number of batches to "
                "predict.") from None
        warnings.warn(f"{error} All stop together; the batches that are left "
                      "are not used.", UnevenDataWarning, stacklevel=3)
        self._stop()

    def _stop(self) -> NoReturn:
        _state.awaited, _state.is_stopped = None, True
        raise StopIteration

    def _common_size(self, found: list[dict[str, Any]]) -> int | None:
        """Returns the samples that all processes take; None for all."""
        sizes = [compare.batch_size(other["batch"]) for other in found]
        if len(set(sizes)) == 1 and len(
                {str(other.get("contents")) for other in found}) == 1:
            return None
        number = next((n for n, size in enumerate(sizes)
                       if size != sizes[0]), 1)
        had = (f"process 0 has {sizes[0]} samples and process {number} has "
               f"{sizes[number]}, at {self._here()}")
        if self._verb == "predict" or self._batch_dim is None or (
                None in sizes):
            raise ProcessError(
                f"The processes cannot share a batch of which {had}. Give all "
                "of them the same samples.")
        parts = self._mesh.dim_size(self._batch_dim)
        size = min(sizes) // parts * parts
        warnings.warn(
            f"The last samples of a batch are left out, of which {had}: all "
            f"processes take the first {size}, which the batch axis of size "
            f"{parts} divides.", UnevenDataWarning, stacklevel=3)
        if size == 0:
            self._stop()
        return size

    def _compare_contents(self, leaves: list[tuple[str, Any]]) -> None:
        """Refuses other values in parts that several processes hold."""
        mine = [[path, {} if x is None else digest.of_contents(
            x, batches.layout_of_batch(x.shape, self._mesh, self._batch_dim))]
            for path, x in leaves]
        self._refuse(compare.parts_difference("batch", self._exchange(
            "values", mine, f"comparing batches before {self._here()}")))


@contextlib.contextmanager
def of_epoch(original: Callable[..., Any], data: Any) -> Iterator[None]:
    """`catch_stop_iteration` of Keras: all steps of one epoch are inside.

    Keras counts steps where it knows how many there are, and then asks for no
    further batch: the others are told here that there is none.
    """
    before = (getattr(_state, "step", None),
              getattr(_state, "awaited", None))
    _state.step, _state.awaited, _state.is_stopped = 0, None, False
    try:
        with original(data):
            try:
                yield
            except StopIteration:
                # Keras would take it for data that ended too early, and
                # tf_keras train no further epoch.
                if not _state.is_stopped:
                    raise
        if _state.awaited is not None:
            _state.awaited.announce(messages.ENDED)
    except BaseException as error:
        if _state.awaited is not None:
            _state.awaited.announce(messages.FAILED, _first_line(error))
        raise
    finally:
        _state.step, _state.awaited = before




def _leaves(batch: Any) -> list[tuple[str, Any]]:
    """Returns path and value of each tensor of a batch, None included."""
    return [("/".join(map(str, path)) or "0",
             None if x is None or isinstance(x, tf.experimental.Optional)
             else x if hasattr(x, "shape") else np.asarray(x))
            for path, x in keras.tree.flatten_with_path(batch)]


def _cut(batch: Any, size: int) -> Any:
    return keras.tree.map_structure(
        lambda x: x if x is None or isinstance(x, tf.experimental.Optional)
        else x[:size], batch)


def _why_aborted(error: Exception) -> str:
    line = str(error).partition(_ABORTED)[2].partition("\n")[0]
    return line.rpartition("Error reported from ")[2].strip(" .") + "."


def _first_line(error: BaseException) -> str:
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line[:300]}"


def _times_set(model: Any) -> int:
    """Returns how often weights and optimizer were set outside of a step."""
    variables = [*model.weights, *digest.variables_of(
        getattr(model, "optimizer", None))]
    return sum(getattr(digest.on_mesh(v), "times_set", 0) for v in variables)
