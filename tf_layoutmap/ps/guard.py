"""Says who is gone or silent, where TensorFlow or nobody says anything."""

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

# For a process to answer when something is wrong.
_ANSWER_SECONDS = 5.0


class Guard:
    """Calls what uses the cluster, and explains its errors."""

    def __init__(
        self,
        all_processes: Sequence[Process],
        deadline: float,
        tell: Callable[[], tuple[int, str]],
        *,
        restarts_program: bool,
    ):
        """Takes whom to ask.

        Args:
          all_processes: Of the cluster.
          deadline: Seconds that messages speak of.
          tell: Returns how much the newest checkpoint holds, as a number that
            grows, and what to do after a loss.
          restarts_program: Whether this program starts anew after the loss of
            a server.
        """
        self._processes = all_processes
        self._deadline = deadline
        self._tell = tell
        self._restarts_program = restarts_program
        self._all_have_answered = False

    def call(
        self, function: Callable[[], Any], *, always_traces: bool = False
    ) -> Any:
        """Calls a function that uses the cluster, and returns its result.

        Args:
          function: Function without arguments.
          always_traces: Whether each call of `function` traces functions, not
            only the first one.

        Raises:
          StepDeadlineError: `function` raised a `LateError`, or a process did
            not answer within the deadline before functions were traced.
          ServerLostError: It raised one of `rounds.LOST`.
        """
        try:
            if always_traces or not self._all_have_answered:
                self._check_all_answer()
            return function()
        except waiting.LateError:
            raise self.late() from None
        except rounds.LOST as error:
            self._lose_server(error)

    def _check_all_answer(self):
        """Checks that all processes answer within the deadline.

        TensorFlow registers each traced function with all processes and waits
        for their answers without a deadline. It holds the lock of the Python
        interpreter during the wait, so no other thread could end it.

        Raises:
          LateError: One does not answer.
        """
        answers = processes.ask_all(self._processes, self._deadline)
        if None in answers.values():
            raise waiting.LateError
        self._all_have_answered = True

    def late(self) -> StepDeadlineError:
        """Returns the error of a step that does not end.

        From now on this process can end although others do not answer.
        """
        exits.leave_cluster()
        wrong = processes.silent(self._processes, _ANSWER_SECONDS)
        return StepDeadlineError(
            f"No step has ended within {self._deadline:g} s. "
            f"{'; '.join(wrong) or 'All processes answer'}. "
            f"{self._tell()[1]}"
        )

    def _lose_server(self, error: tf.errors.OpError) -> NoReturn:
        wrong = processes.silent(
            [one for one in self._processes if one.job == "ps"], _ANSWER_SECONDS
        )
        num_saved, remedy = self._tell()
        message = (
            "A parameter server is lost, or was started again: "
            f"{'; '.join(wrong) or 'all answer by now'}. What it held is "
            f"gone. {remedy}"
        )
        if not self._restarts_program or not restarts.may_restart(
            num_saved, os.environ
        ):
            raise ServerLostError(message) from error
        logging.error("%s This program starts anew.", message)
        logging.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
