"""Detects lost or unresponsive processes of a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from tf_layoutmap.ps import exits, processes, restarts, rounds, waiting
from tf_layoutmap.ps.processes import Process
from tf_layoutmap.ps.waiting import ServerLostError, StepDeadlineError

# Timeout in seconds for the answer of a process after an error.
_ANSWER_SECONDS = 5.0


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
            did not answer within the deadline of the check before tracing.
          ServerLostError: If `function` raised one of `rounds.LOST`.
        """
        try:
            if always_traces or not self._all_have_answered:
                self._check_all_answer()
            return function()
        except waiting.LateError:
            raise self.deadline_error() from None
        except rounds.LOST as error:
            self._handle_server_loss(error)

    def _check_all_answer(self):
        """Checks that all processes answer within the deadline.

        TensorFlow registers each traced function with all processes, and waits
        for their answers without a deadline. During this wait, TensorFlow holds
        the lock of the Python interpreter, so no other thread could stop the
        wait.

        Raises:
          LateError: If a process does not answer.
        """
        answers = processes.describe_all(self._processes, self._deadline)
        if None in answers.values():
            raise waiting.LateError
        self._all_have_answered = True

    def deadline_error(self) -> StepDeadlineError:
        """Returns the error for steps that do not end.

        After this call, this process can exit even if other processes do not
        answer.
        """
        exits.leave_cluster()
        wrong = processes.find_silent(self._processes, _ANSWER_SECONDS)
        return StepDeadlineError(
            f"No step has ended within {self._deadline:g} s. "
            f"{'; '.join(wrong) or 'All processes answer'}. "
            f"{self._checkpoint_status()[1]}"
        )

    def _handle_server_loss(self, error: tf.errors.OpError) -> NoReturn:
        wrong = processes.find_silent(
            [one for one in self._processes if one.job == "ps"], _ANSWER_SECONDS
        )
        num_saved, remedy = self._checkpoint_status()
        message = (
            "A parameter server was lost or restarted: "
            f"{'; '.join(wrong) or 'all servers answer now'}. Its variables "
            f"are lost. {remedy}"
        )
        if not self._restarts_program or not restarts.may_restart(
            num_saved, os.environ
        ):
            raise ServerLostError(message) from error
        logging.error("%s This program restarts.", message)
        logging.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
