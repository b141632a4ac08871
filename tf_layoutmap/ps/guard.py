"""Detects lost or unresponsive processes of a cluster."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from tf_layoutmap.ps import (
    answers,
    exits,
    handled_errors,
    lost_calls,
    messages,
    processes,
    restarts,
    waiting,
)
from tf_layoutmap.ps.processes import Process
from tf_layoutmap.ps.waiting import ServerLostError, StepDeadlineError

# Timeout in seconds for the answer of a process after an error.
_ANSWER_SECONDS = 5.0
# Words of TensorFlow's errors about connections between its processes.
_CONNECTION = re.compile(
    r"Socket closed|recvmsg|Connection reset|Broken pipe|failed to connect"
    r"|context_id|/job:(?:ps|worker)"
)

_restart_lock = threading.Lock()


class Guard:
    """Calls functions that use the cluster, and raises clearer errors."""

    def __init__(
        self,
        all_processes: Sequence[Process],
        deadline: float,
        checkpoint_status: Callable[[], tuple[int, str]],
        *,
        restarts_program: bool,
    ):
        """Creates the guard.

        Args:
          all_processes: Processes of the cluster.
          deadline: Deadline in seconds, for error messages.
          checkpoint_status: Function that returns a number and a text. The
            number increases with each new checkpoint. The text says how to
            continue after a loss.
          restarts_program: Whether this program restarts after the loss of a
            server.
        """
        self._processes = all_processes
        self._deadline = deadline
        self._checkpoint_status = checkpoint_status
        self._restarts_program = restarts_program
        self._all_have_answered = False

    def call(
        self, function: Callable[[], Any], *, always_traces: bool = False
    ) -> Any:
        """Calls a function that uses the cluster, and returns its result.

        Args:
          function: Function without arguments.
          always_traces: Whether each call of `function` traces functions. By
            default, only the first call traces functions.

        Raises:
          StepDeadlineError: If `function` raised a `LateError`, or a process
            did not answer within the deadline.
          ServerLostError: If `function` raised one of `handled_errors.LOST`.
        """
        answers.set_deadline(self._deadline)
        try:
            with handled_errors.error_handler():
                if always_traces or not self._all_have_answered:
                    self._check_all_answer()
                return function()
        except waiting.LateError:
            raise self.deadline_error() from None
        except handled_errors.LOST as error:
            if isinstance(error, (ServerLostError, StepDeadlineError)):
                raise  # Another thread of `function` has raised it.
            raise self._error_after_loss(self._find_faults(), error) from error

    def cover_other_calls(self) -> None:
        """Explains errors of calls that are not made by `call`, from now on.

        The deadline of this guard also applies to these calls.
        """
        answers.set_deadline(self._deadline)
        lost_calls.explain_with(self._explain)

    def _explain(self, error: tf.errors.OpError) -> Exception | None:
        """Returns the error to raise instead of `error`, or None."""
        faults = self._find_faults()
        if not faults.texts and not _CONNECTION.search(error.message):
            return None  # Files and other services raise the same errors.
        loss_error = self._error_after_loss(faults, error)
        return lost_calls.error_of(type(loss_error), str(loss_error), error)

    def _check_all_answer(self):
        """Checks that all processes answer within the deadline.

        TensorFlow registers each traced function with all processes, and waits
        for their answers without a deadline. During this wait, TensorFlow holds
        the lock of the Python interpreter, so no other thread could stop the
        wait.

        Raises:
          LateError: If a process does not answer.
        """
        descriptions = processes.describe_all(self._processes, self._deadline)
        if None in descriptions.values():
            raise waiting.LateError
        self._all_have_answered = True

    def deadline_error(self) -> StepDeadlineError:
        """Returns the error for steps that do not end.

        After this call, this process can exit even if other processes do not
        answer.
        """
        exits.leave_cluster()
        return self._error_of_silence(self._find_faults())

    def _find_faults(self) -> processes.Faults:
        return processes.find_faults(self._processes, _ANSWER_SECONDS)

    def _error_after_loss(
        self, faults: processes.Faults, error: tf.errors.OpError
    ) -> StepDeadlineError | ServerLostError:
        """Returns the error after one of `handled_errors.LOST`.

        If the program restarts after a loss, the method does not return.
        """
        exits.leave_cluster()
        if faults.has_stopped and not faults.has_lost_server:
            return self._error_of_silence(faults)
        num_saved, remedy = self._checkpoint_status()
        message = f"{_describe_loss(faults, error)} {remedy}"
        # Several threads can lose the same process. The program restarts once.
        with _restart_lock:
            if self._restarts_program and restarts.may_restart(
                num_saved, os.environ
            ):
                _restart_program(message)
        return ServerLostError(message)

    def _error_of_silence(self, faults: processes.Faults) -> StepDeadlineError:
        return StepDeadlineError(
            f"No step or call has ended within {self._deadline:g} s. "
            f"{'; '.join(faults.texts) or 'All processes answer'}. "
            f"{self._checkpoint_status()[1]}"
        )


def _describe_loss(faults: processes.Faults, error: tf.errors.OpError) -> str:
    texts = "; ".join(faults.texts)
    if faults.has_lost_server:
        return (
            f"A parameter server was lost or restarted: {texts}. Its variables "
            "are lost."
        )
    if texts:
        return f"A worker was lost or restarted: {texts}."
    return (
        "The connection to a server or worker was interrupted, but all "
        f"processes answer now ({messages.sentence_of(error.message)})."
    )


def _restart_program(message: str) -> NoReturn:
    logging.error("%s This program restarts.", message)
    logging.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
