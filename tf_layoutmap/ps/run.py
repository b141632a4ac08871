"""`Run`, for fault-tolerant training on parameter servers."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import checks, literals
from tf_layoutmap.ps import (
    checkpoints,
    connection,
    datasets,
    guard,
    restarts,
    rounds,
    step_closure,
    waiting,
)

# Target duration of a round in seconds. Checkpoints are written between rounds.
_ROUND_SECONDS = 5.0


class Run:
    """Schedules steps on workers, and saves checkpoints.

    A closure is one or more steps of one worker. If a worker fails, the steps
    of its closure that the servers have not applied run again on any worker.
    The tables of a `tlm.TPUEmbedding` are updated only once for each step.
    Other variables are updated each time that the step runs.

    ```py
    strategy = tlm.ps.connect()
    with strategy.scope():
        embedding = tlm.TPUEmbedding(feature_config, optimizer)

    def step(batch):
        features, labels = batch
        embedding.enqueue(features)
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            loss = loss_of(activations, labels)
        embedding.apply_gradients(tape.gradient(loss, activations))
        return loss

    run = tlm.ps.Run(strategy, step, dataset_fn, "/shared/checkpoints",
                     objects={"embedding": embedding})
    run.steps(until=10_000)
    ```

    If the program is started again, it continues from its newest checkpoint.
    `steps(until=10_000)` then runs only the remaining steps of the 10,000.

    Attributes:
      num_done: Number of steps whose updates are in the tables, including the
        steps in the restored checkpoint.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        step_fn: Callable[..., object],
        dataset_fn: Callable[..., tf.data.Dataset],
        checkpoint_dir: str | os.PathLike,
        *,
        objects: Mapping[str, object],
        save_every: str | float = "5min",
        on_server_loss: literals.OnServerLoss = "raise",
        step_deadline: str | float = "10min",
        max_to_keep: int = 3,
        allow_missing: bool | Sequence[str] = False,
        steps_per_closure: int | None = None,
        prefetch_steps: int = 0,
    ):
        """Creates the run, and restores the newest checkpoint, if any.

        Args:
          strategy: Result of `connect`.
          step_fn: Function that runs one step of each embedding. The function
            is called with one batch, on a worker, in `strategy.run`, and is
            traced once.
          dataset_fn: Function that returns the dataset of a worker, as for
            `tlm.ps.Datasets`. The function may take a
            `tf.distribute.InputContext`. The dataset must be infinite
            (`Dataset.repeat`).
          checkpoint_dir: Directory for checkpoints. This process and all
            servers must have access to the directory under the same path.
          objects: Objects to save, by name: the embedding, and all other
            objects that training changes.
          save_every: Time between checkpoints, such as `"5min"`, or in seconds.
            `steps` also writes a checkpoint before it returns.
          on_server_loss: `"raise"` raises `ServerLostError`. `"restart"`
            restarts this program with the same arguments, in the same process.
            The restarted program waits in `connect` until the server is
            available again, and continues from the newest checkpoint. The
            program restarts at most three times without a newer checkpoint.
          step_deadline: Maximum time without a finished closure. Calls that
            are not steps, such as `stats`, raise an error if a server or worker
            does not answer within this time.
          max_to_keep: Number of checkpoints to keep, at least 1.
          allow_missing: Names of objects that may be in the newest checkpoint
            without being in `objects`. The next checkpoint does not contain
            these objects. True for all names.
          steps_per_closure: Number of steps that a worker runs per call of the
            coordinator, from 1 to 512. With more steps, all processes use less
            time per step, and `step_deadline` limits the time of more steps. At
            most 512 steps are in flight, so `512 / steps_per_closure` workers
            have work. Each update is still applied exactly once. None: the
            number is 1 at first, and increases once to at most 16 after some
            time, if a closure then takes at most 0.25 s and 1/40 of
            `step_deadline`. With `prefetch_steps`, None is 16, or
            `prefetch_steps + 1` if this is larger.
          prefetch_steps: With 1, a worker reads the rows of the next step of a
            closure from the tables of a `tlm.TPUEmbedding` while it computes
            the current step. The rows can then miss the update of the current
            step, and `embedding.stats()["staleness"]` counts this update. All
            other variables are read and updated in the order of the steps. With
            a larger number, rows are read that many steps earlier. Must be less
            than `steps_per_closure`.

        Raises:
          TypeError: If a function is not callable, or an argument has a wrong
            type.
          ValueError: If a setting is invalid, or if the names, variables or
            shapes of `objects` do not match the newest checkpoint. In this
            case, no object is changed.
          OSError: If the directory is not writable, or if the newest checkpoint
            is damaged.
          ServerLostError, StepDeadlineError: If a server or worker is lost or
            does not answer while a checkpoint is restored.
        """
        all_processes = connection.processes_of(strategy)
        if all_processes is None:
            raise TypeError(
                "Argument `strategy` must be the result of `tlm.ps.connect`. "
                f"Received: {strategy!r}."
            )
        for name, function in [
            ("step_fn", step_fn),
            ("dataset_fn", dataset_fn),
        ]:
            if not callable(function):
                raise TypeError(
                    f"Argument `{name}` must be callable. "
                    f"Received: {function!r}."
                )
        if not objects:
            raise ValueError(
                "Argument `objects` must contain the objects to save, by name. "
                f"Received: {objects!r}."
            )
        checks.check_one_of(
            "on_server_loss", on_server_loss, restarts.ON_SERVER_LOSS
        )
        checks.check_int("max_to_keep", max_to_keep, lowest=1)
        if steps_per_closure is not None:
            checks.check_int(
                "steps_per_closure",
                steps_per_closure,
                lowest=1,
                highest=rounds.MAX_STEPS,
            )
        checks.check_int(
            "prefetch_steps",
            prefetch_steps,
            lowest=0,
            highest=rounds.MAX_STEPS - 1,
        )
        if steps_per_closure is None and prefetch_steps:
            steps_per_closure = max(rounds.AUTOMATIC_STEPS, prefetch_steps + 1)
        if (
            steps_per_closure is not None
            and prefetch_steps >= steps_per_closure
        ):
            raise ValueError(
                "Argument `prefetch_steps` must be less than "
                "`steps_per_closure`, because a worker prefetches only rows of "
                "the same closure. Received: prefetch_steps="
                f"{prefetch_steps}, steps_per_closure={steps_per_closure}."
            )
        if isinstance(allow_missing, str):
            raise TypeError(
                "Argument `allow_missing` must be a bool or a list of names. "
                f"Received: {allow_missing!r}."
            )
        self._save_seconds = waiting.read_seconds(save_every, "save_every")
        self._deadline = waiting.read_seconds(step_deadline, "step_deadline")
        self._guard = guard.Guard(
            all_processes,
            self._deadline,
            self._checkpoint_status,
            restarts_program=on_server_loss == "restart",
        )
        self._folder = checkpoints.CheckpointFolder(checkpoint_dir, max_to_keep)
        self._checkpoint = tf.train.Checkpoint(**objects)
        num_workers = sum(process.job == "worker" for process in all_processes)
        self._rounds = rounds.Rounds(
            strategy,
            step_closure.step_of_batch(strategy, step_fn),
            datasets.worker_dataset_function(dataset_fn, num_workers),
            num_workers=num_workers,
            deadline=self._deadline,
            seconds=min(_ROUND_SECONDS, self._save_seconds),
            steps_per_closure=steps_per_closure,
            prefetch_steps=prefetch_steps,
        )
        self.num_done = self._num_restored = 0
        # The guard checks all processes, because TensorFlow traces functions
        # when it restores a checkpoint.
        self._guard.cover_other_calls()
        self.num_done = self._num_restored = self._guard.call(
            lambda: self._restore(allow_missing), always_traces=True
        )
        # Whether the next call of `steps` logs the meaning of `count`.
        self._explains_count = self._num_restored > 0
        self._num_saved = self.num_done
        self._saved_at = time.monotonic()

    def steps(
        self, count: int | None = None, *, until: int | None = None
    ) -> Any:
        """Trains, and saves a checkpoint.

        `steps(100)` runs 100 more steps, also if the checkpoint that the run
        has restored contains steps. `steps(until=100)` runs steps until
        `num_done` is 100, and therefore only the remaining steps after a
        restart. A program that may be restarted should use `until`. If no step
        has to run, the method logs this as a warning.

        Args:
          count: Number of steps, at least 0, in addition to `num_done`.
          until: Total number of steps, at least 0, including the steps in the
            restored checkpoint. Exactly one of `count` and `until` must be
            passed.

        Returns:
          Result of `step_fn` in the last scheduled step, as numpy arrays. None
          if no step had to run, or the worker that had the result was lost.

        Raises:
          TypeError, ValueError: If `count` or `until` is not a valid number,
            both or none of them are passed, or the dataset of a worker has
            ended.
          ServerLostError: If a server is lost. Start the program again.
          StepDeadlineError: If no closure ended within the deadline. The
            message names the processes that do not answer. Exit the process,
            with any code, and start the program again.
          tf.errors.OpError: If a step failed, for example because of an invalid
            id. The batch of this step does not count, but the other batches do.
            Call `steps` again to continue.
          RuntimeError: If some servers have applied a step that no worker could
            complete, or an earlier call was interrupted. Start the program
            again.
          OSError: If a checkpoint cannot be written. The previous checkpoint is
            not changed.
        """
        target = self._target(count, until)
        result = None
        while self.num_done < target:
            ended = self._guard.call(
                functools.partial(self._rounds.run, target - self.num_done)
            )
            self.num_done += ended.num_done
            if ended.error is not None:
                raise ended.error
            result = self._rounds.fetch(ended.values[-1])
            if time.monotonic() - self._saved_at >= self._save_seconds:
                self.save()
        if self._num_saved != self.num_done:
            self.save()
        return result

    def _target(self, count: int | None, until: int | None) -> int:
        """Returns the value of `num_done` after a call of `steps`.

        Raises:
          TypeError, ValueError: If the arguments of `steps` are not valid.
        """
        if (count is None) == (until is None):
            raise TypeError(
                "`steps` requires exactly one of `count`, the number of "
                "further steps, and `until`, the total number of steps. "
                "Received: "
                f"count={count!r}, until={until!r}."
            )
        if until is not None:
            target = checks.check_int("until", until, lowest=0)
        else:
            target = self.num_done + checks.check_int("count", count, lowest=0)
        if target <= self.num_done:
            logging.warning(
                "`steps(%s)` runs no step: %d steps are done, of which %d are "
                "from the restored checkpoint.",
                f"until={until}" if count is None else count,
                self.num_done,
                self._num_restored,
            )
        elif count is not None and self._explains_count:
            logging.warning(
                "`steps(%d)` runs %d more steps after the %d steps of the "
                "restored checkpoint. To run only the remaining steps of a "
                "total, use `steps(until=...)`.",
                count,
                count,
                self._num_restored,
            )
        self._explains_count = False
        return target

    def save(self):
        """Writes a checkpoint now.

        Raises:
          ServerLostError, StepDeadlineError, OSError: As for `steps`.
          RuntimeError: If a call of `steps` was interrupted or could not
            complete a step. The tables must not be saved in this state.
        """
        self._rounds.check_settled()
        # The guard must check all processes, because TensorFlow traces a
        # function for each checkpoint.
        self._guard.call(
            lambda: self._folder.save(
                self.num_done,
                lambda prefix: waiting.call_with_deadline(
                    lambda: self._checkpoint.write(prefix), self._deadline
                ),
            ),
            always_traces=True,
        )
        self._num_saved = self.num_done
        self._saved_at = time.monotonic()

    def _restore(self, allow_missing: bool | Sequence[str]) -> int:
        newest = self._folder.newest()
        if newest is None:
            return 0
        with self._folder.naming_damaged(newest):
            checkpoints.check_objects(
                newest.prefix, self._checkpoint, allow_missing
            )
        logging.info(
            "Continuing after %d closures, from %s.",
            newest.num_done,
            newest.prefix,
        )
        try:
            with self._folder.naming_damaged(newest):
                status = self._checkpoint.read(newest.prefix)
            status.assert_existing_objects_matched()
        except AssertionError as error:
            differences = checkpoints.not_restored(
                newest.prefix, self._checkpoint
            )
            raise ValueError(
                "Argument `objects` must match the newest checkpoint, "
                f"{newest.prefix!r}: {differences or error}"
            ) from None
        return newest.num_done

    def _checkpoint_status(self) -> tuple[int, str]:
        """Returns the newest checkpoint's closures, and an error text."""
        newest = self._folder.newest()
        where = (
            f"training continues after {newest.num_done} closures"
            if newest
            else "there is no checkpoint yet"
        )
        return newest.num_done if newest else 0, (
            f"Start missing servers and this program again: {where} "
            f"({self.num_done} were done)."
        )
