"""`Run`: training over parameter servers that outlives its processes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import checks
from tf_layoutmap.ps import (
    checkpoints,
    connection,
    datasets,
    guard,
    restarts,
    rounds,
    waiting,
)

# Between two moments at which no closure is under way.
_ROUND_SECONDS = 5.0


class Run:
    """Schedules steps on workers, and saves what came of them.

    A closure is one step of one worker. When a worker dies, its closure is
    run again, here or there, and counts once in the tables of a
    `tlm.TPUEmbedding`. Other variables are written by a closure as often as
    it runs.

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
    run.steps(10_000)
    ```

    Started again, the same program goes on where its newest checkpoint is:
    `steps(10_000)` takes what is left of 10,000.

    Attributes:
      num_done: Closures that count in the tables, those of the checkpoint
        that it went on from included.
    """

    def __init__(
        self,
        strategy: Any,
        step_fn: Callable[..., Any],
        dataset_fn: Callable[..., Any],
        checkpoint_dir: str | os.PathLike,
        *,
        objects: Mapping[str, Any],
        save_every: str | float = "5min",
        on_server_loss: str = "raise",
        step_deadline: str | float = "10min",
        max_to_keep: int = 3,
        allow_missing: bool | Sequence[str] = False,
    ):
        """Reads the newest checkpoint, if there is one.

        Args:
          strategy: What `connect` returned.
          step_fn: Takes one batch, on a worker; called in its `strategy.run`
            and traced once. It takes one step of each embedding.
          dataset_fn: Makes the dataset of a worker, without end
            (`Dataset.repeat`), as that of `tlm.ps.Datasets` does: it may take
            a `tf.distribute.InputContext`.
          checkpoint_dir: A folder that this process and all servers see under
            the same name.
          objects: What is saved, by name: the embedding, and all else that
            training changes.
          save_every: Time between checkpoints, as `"5min"` or seconds. One is
            written at the end of `steps`, too.
          on_server_loss: `"raise"`: a `ServerLostError`. `"restart"`: this
            program starts anew, in the same process, with its arguments. It
            waits in `connect` until the server is there again, and goes on
            from the newest checkpoint; three times, if there is no new one.
          step_deadline: How long no closure may end.
          max_to_keep: Checkpoints to keep, at least 1.
          allow_missing: Names of what the newest checkpoint may hold and
            `objects` may lack; the next checkpoint does not have it any more.
            True for all names.

        Raises:
          TypeError: If a function or an object is none.
          ValueError: If a setting is invalid; or `objects` are not what the
            newest checkpoint was written of, by their names, variables and
            shapes. Nothing has been read into them then.
          OSError: If the folder cannot be written to.
        """
        all_processes = connection.processes_of(strategy)
        if all_processes is None:
            raise TypeError(
                "Argument `strategy` must be what `tlm.ps.connect` returned. "
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
                "Argument `objects` must have what is saved, by name. "
                f"Received: {objects!r}."
            )
        checks.check_one_of(
            "on_server_loss", on_server_loss, restarts.ON_SERVER_LOSS
        )
        checks.check_int("max_to_keep", max_to_keep, lowest=1)
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
            self._told_of_loss,
            restarts_program=on_server_loss == "restart",
        )
        self._folder = checkpoints.CheckpointFolder(checkpoint_dir, max_to_keep)
        self._checkpoint = tf.train.Checkpoint(**objects)
        num_workers = sum(one.job == "worker" for one in all_processes)
        self._rounds = rounds.Rounds(
            strategy,
            rounds.step_of_batch(strategy, step_fn),
            datasets.function_of_worker(dataset_fn, num_workers),
            num_workers=num_workers,
            deadline=self._deadline,
            seconds=min(_ROUND_SECONDS, self._save_seconds),
        )
        self.num_done = self._restore(allow_missing)
        self._target = 0
        self._num_saved = self.num_done
        self._saved_at = time.monotonic()

    def steps(self, count: int) -> Any:
        """Trains for so many closures more, and saves.

        A program that was started again calls `steps` as it did before: what
        the checkpoint holds is not trained again, and calls that it covers
        return at once.

        Args:
          count: Closures, at least 0, besides those of the calls before.

        Returns:
          What `step_fn` returned in the last closure scheduled, as numpy;
          None if nothing was left to do, or its worker has gone since.

        Raises:
          TypeError, ValueError: If `count` is no number of closures; or the
            dataset of a worker has ended.
          ServerLostError: A server is gone. This process cannot go on: start
            it again.
          StepDeadlineError: No closure ended within the deadline; it says who
            does not answer. This process cannot go on: exit, with any code,
            so that it can be started again.
          tf.errors.OpError: A step failed, as by a bad id. Its batch does not
            count, those around it do; `steps` may be called again, for so
            many more.
          RuntimeError: Some servers have applied a step that no worker could
            complete, or a call before was interrupted. This process cannot go
            on: start it again.
          OSError: A checkpoint could not be written; the one before is
            intact.
        """
        self._target += checks.check_int("count", count, lowest=0)
        result = None
        while self.num_done < self._target:
            ended = self._guard.call(
                functools.partial(
                    self._rounds.run, self._target - self.num_done
                )
            )
            self.num_done += ended.num_done
            if ended.error is not None:
                # What the program asks for next comes on top of what is done.
                self._target = self.num_done
                raise ended.error
            result = self._rounds.fetch(ended.values[-1])
            if time.monotonic() - self._saved_at >= self._save_seconds:
                self.save()
        if self._num_saved != self.num_done:
            self.save()
        return result

    def save(self):
        """Writes a checkpoint now.

        Raises:
          ServerLostError, StepDeadlineError, OSError: As of `steps`.
          RuntimeError: A call of `steps` was interrupted, or could not
            complete a step: the tables must not be saved.
        """
        self._rounds.check_settled()
        # TensorFlow traces a function for each checkpoint.
        self._guard.call(
            lambda: self._folder.save(
                self.num_done,
                lambda prefix: waiting.within(
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
        checkpoints.check_objects(
            newest.prefix, self._checkpoint, allow_missing
        )
        logging.info(
            "Going on after %d closures, from %s.",
            newest.num_done,
            newest.prefix,
        )
        try:
            self._checkpoint.read(
                newest.prefix
            ).assert_existing_objects_matched()
        except AssertionError as error:
            raise ValueError(
                "Argument `objects` must be what the newest checkpoint was "
                f"written of, {newest.prefix!r}: {error}"
            ) from None
        return newest.num_done

    def _told_of_loss(self) -> tuple[int, str]:
        """What to go on from, as a number that grows, and how."""
        newest = self._folder.newest()
        where = (
            f"it goes on after {newest.num_done} closures"
            if newest
            else "there is no checkpoint yet"
        )
        return newest.num_done if newest else 0, (
            f"Start missing servers and this program again: {where} "
            f"({self.num_done} were done)."
        )
