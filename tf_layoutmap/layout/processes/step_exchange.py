"""Which step a process is about to take, and telling the others about it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.processes import compare, messages
from tf_layoutmap.layout.processes.epoch import state
from tf_layoutmap.layout.processes.messages import ProcessError

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
