"""The loops of `fit` and `evaluate` over parameter servers, for both Keras."""

# DOC-MERGE: The arguments of `fit` and `evaluate` where the data are `Datasets`.
# DOC-MERGE: What the loss of a server means for `fit`: an error, or a new start.
from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, strategies
from tf_layoutmap.ps import connection
from tf_layoutmap.ps import guard as ps_guard
from tf_layoutmap.ps.datasets import Datasets
from tf_layoutmap.ps.fit_epochs import Epochs, Progress

_REMEDY = (
    "Start missing servers and this program again; with a "
    "BackupAndRestore callback it goes on from its last epoch."
)


def raise_server_loss(strategy: Any, data: Datasets) -> ps_guard.Guard:
    """Returns what makes an error of a loss."""
    return ps_guard.Guard(
        connection.processes_of(strategy) or [],
        data.deadline,
        lambda: (0, _REMEDY),
        restarts_program=False,
    )


def server_loss_handler(
    strategy: Any, data: Datasets, backups: Sequence[Any]
) -> ps_guard.Guard:
    """Returns what does of a loss in `fit` what `data` asks for.

    Args:
      strategy: The model's.
      data: What `fit` is given.
      backups: The BackupAndRestore callbacks that it is given.

    Raises:
      ValueError: The program is to start anew, and would not go on where it
        was: it has no backup, or no cluster of `connect`.
    """
    if data.on_server_loss == "raise":
        return raise_server_loss(strategy, data)
    processes = connection.processes_of(strategy)
    if processes is None:
        raise ValueError(
            'Argument `on_server_loss` of tlm.ps.Datasets must be "raise" '
            "but under what `tlm.ps.connect` returned, which waits for "
            f'servers. Received: "restart" and {strategy!r}.'
        )
    if len(backups) != 1:
        raise ValueError(
            "Argument `callbacks` of `fit` must have one BackupAndRestore of "
            'the model\'s Keras with on_server_loss="restart" of '
            "tlm.ps.Datasets: the program goes on from what it has saved. "
            f"Received: {len(backups)}."
        )
    return ps_guard.Guard(
        processes,
        data.deadline,
        lambda: (_last_change(os.fspath(backups[0].backup_dir)), _REMEDY),
        restarts_program=True,
    )


def _last_change(folder: str) -> int:
    """When a file below a folder was written last, in ns; 0 without any."""
    return max(
        (
            tf.io.gfile.stat(os.path.join(path, name)).mtime_nsec
            for path, _, names in tf.io.gfile.walk(folder)
            for name in names
        ),
        default=0,
    )


# In the logs, behind the metrics.
EXAMPLES = "examples/s"


class KerasVersion(Protocol):
    """What differs between the two."""

    def check_compiled(self, model: Any, verb: str) -> None:
        """Refuses a model without `compile`."""
        ...

    def build(self, model: Any, strategy: Any, element_spec: Any) -> None:
        """Makes all variables of a model, as far as shapes are known."""
        ...

    def step(self, model: Any, verb: str) -> Any:
        """Returns the step of a batch, as `Epochs` takes it."""
        ...

    def add(self, model: Any, verb: str, steps: list[Any]) -> dict[str, Any]:
        """Adds the values of steps to the metrics; returns the logs."""
        ...

    def callbacks(self, model: Any, callbacks: Any, **options: Any) -> Any:
        """Returns a list of callbacks."""
        ...

    def backups(self, callbacks: Any) -> list[Any]:
        """Returns each BackupAndRestore among what `fit` is given.

        Raises:
          ValueError: One would write nothing.
        """
        ...

    def start(
        self, model: Any, initial_epoch: int, steps: int | None
    ) -> tuple[int, int]:
        """Returns the first epoch, and its first step."""
        ...

    def finish(self, model: Any) -> None:
        """Finishes averages of weights."""
        ...


def fit(
    keras: KerasVersion,
    model: Any,
    data: Datasets,
    *,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_data: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Container[int] = 1,
) -> Any:
    """Trains as `fit` of Keras does; returns the History."""
    strategy = strategy_of(model, "fit")
    keras.check_compiled(model, "fit")
    guard = server_loss_handler(strategy, data, keras.backups(callbacks))
    train = Epochs(strategy, data, keras.step(model, "train"), guard)
    test = (
        Epochs(strategy, validation_data, keras.step(model, "test"), guard)
        if (isinstance(validation_data, Datasets))
        else None
    )
    # Callbacks and metrics read and write variables of servers, too.
    return guard.call(
        functools.partial(
            _fit,
            keras,
            model,
            train,
            test,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_data=validation_data,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
        )
    )


def _fit(
    keras: KerasVersion,
    model: Any,
    train: Epochs,
    test: Epochs | None,
    *,
    epochs: int,
    verbose: Any,
    callbacks: Any,
    validation_data: Any,
    initial_epoch: int,
    steps_per_epoch: int | None,
    validation_steps: int | None,
    validation_batch_size: int | None,
    validation_freq: int | Container[int],
) -> Any:
    keras.build(model, model.distribute_strategy, train.element_spec)
    known = keras.callbacks(
        model,
        callbacks,
        add_history=True,
        add_progbar=verbose != 0,
        verbose=1 if verbose == "auto" else verbose,
        epochs=epochs,
        steps=steps_per_epoch,
    )
    model.stop_training = False
    known.on_train_begin()
    first_epoch, first_step = keras.start(model, initial_epoch, steps_per_epoch)
    logs: dict[str, Any] = {}
    for epoch in range(first_epoch, epochs):
        model.reset_metrics()
        known.on_epoch_begin(epoch)
        logs = _train_epoch(
            keras, model, train, known, first_step, steps_per_epoch
        )
        first_step = 0
        if validation_data is not None and _is_due(validation_freq, epoch):
            found = (
                _evaluate(keras, model, test, known, validation_steps)
                if test
                else (
                    model.evaluate(
                        **_parts(validation_data),
                        callbacks=known,
                        batch_size=validation_batch_size,
                        steps=validation_steps,
                        return_dict=True,
                        verbose=0,
                    )
                )
            )
            logs.update((f"val_{name}", one) for name, one in found.items())
        known.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    if epochs > 0:
        keras.finish(model)
    known.on_train_end(logs)
    return model.history


def evaluate(
    keras: KerasVersion,
    model: Any,
    data: Datasets,
    *,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """Evaluates as `evaluate` of Keras does."""
    strategy = strategy_of(model, "evaluate")
    keras.check_compiled(model, "evaluate")
    guard = raise_server_loss(strategy, data)
    test = Epochs(strategy, data, keras.step(model, "test"), guard)

    def run() -> dict[str, Any]:
        keras.build(model, strategy, test.element_spec)
        known = keras.callbacks(
            model,
            callbacks,
            add_progbar=verbose != 0,
            verbose=1 if verbose == "auto" else verbose,
            epochs=1,
            steps=steps,
        )
        return _evaluate(keras, model, test, known, steps)

    logs = guard.call(run)
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values


def _train_epoch(
    keras: KerasVersion,
    model: Any,
    train: Epochs,
    known: Any,
    first_step: int,
    num_steps: int | None,
) -> dict[str, Any]:
    logs: dict[str, Any] = {}
    done, seconds, examples = first_step, 0.0, 0
    known.on_train_batch_begin(done)
    for progress in train.run(
        None if num_steps is None else num_steps - first_step
    ):
        logs = _logs(keras, model, "train", progress)
        seconds += progress.seconds
        examples += progress.num_examples
        logs[EXAMPLES] = examples / seconds
        done = first_step + progress.num_steps
        # Of the last batch, as with several steps of one call of Keras.
        known.on_train_batch_end(done - 1, logs)
        if model.stop_training:
            break
        if done != num_steps:
            known.on_train_batch_begin(done)
    _check_not_empty(done > first_step)
    return dict(logs)


def _evaluate(
    keras: KerasVersion, model: Any, test: Epochs, known: Any, steps: int | None
) -> dict[str, Any]:
    known.on_test_begin()
    model.reset_metrics()
    logs: dict[str, Any] = {}
    for progress in test.run(steps):
        known.on_test_batch_begin(progress.num_steps - 1)
        logs = _logs(keras, model, "test", progress)
        known.on_test_batch_end(progress.num_steps - 1, logs)
    _check_not_empty(bool(logs))
    known.on_test_end(logs)
    return logs


def _logs(
    keras: KerasVersion, model: Any, verb: str, progress: Progress
) -> dict[str, Any]:
    return tf.nest.map_structure(
        lambda one: float(one) if np.ndim(one) == 0 else np.asarray(one),
        keras.add(model, verb, progress.values),
    )


def _check_not_empty(has_batches: bool) -> None:
    if not has_batches:
        raise ValueError(
            "Argument `dataset_fn` of tlm.ps.Datasets must make datasets with "
            "batches. Received: none on any worker."
        )


def _is_due(frequency: int | Container[int], epoch: int) -> bool:
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def _parts(data: Any) -> dict[str, Any]:
    """A dataset, or a tuple of arrays, as arguments of `evaluate`."""
    parts = data if isinstance(data, tuple) else (data,)
    return dict(zip(("x", "y", "sample_weight"), parts))


def strategy_of(model: Any, verb: str) -> Any:
    """Returns the strategy that a model was made under.

    Raises:
      ValueError: It has no parameter servers, or the model runs eagerly.
    """
    strategy = model.distribute_strategy
    if not strategies.on_servers(strategy):
        raise ValueError(
            f"`{verb}` of tlm.ps.Datasets needs a model that was made in the "
            "scope of a ParameterServerStrategy, as tlm.ps.connect returns. "
            f"Received: a model of {type(strategy).__name__}."
        )
    if model.run_eagerly:
        raise ValueError(
            "A model over parameter servers must be compiled with "
            "run_eagerly=False: its steps run on workers. Received: True."
        )
    return strategy


# What says how arrays become batches; and what tf_keras has for queues.
_OF_ARRAYS = (
    "y",
    "batch_size",
    "validation_split",
    "class_weight",
    "sample_weight",
)
_WITHOUT_MEANING = (
    "shuffle",
    "max_queue_size",
    "workers",
    "use_multiprocessing",
)


def read_arguments(
    original: Callable[..., Any],
    verb: str,
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Returns the arguments by name, or None if `x` is no `Datasets`.

    Args:
      original: The method of Keras.
      verb: Its name.
      model: Is called.
      args: Without the model.
      kwargs: By name.

    Raises:
      TypeError: As of a call of the method.
      ValueError: An argument is given that is for arrays, or a number of
        steps is below 1.
    """
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    given = {**given, **given.pop("kwargs", {})}
    data = given.pop("x", None)
    if not isinstance(data, Datasets):
        return None
    given.pop(next(iter(inspect.signature(original).parameters)))
    for name in _WITHOUT_MEANING:
        given.pop(name, None)
    for name in _OF_ARRAYS:
        value = given.pop(name, None)
        if value is not None and not (
            name == "validation_split" and value == 0
        ):
            raise ValueError(
                f"Argument `{name}` of `{verb}` must be left out with "
                "tlm.ps.Datasets, whose batches `dataset_fn` makes, with "
                "targets and weights of samples, (x, y, sample_weight). "
                f"Received: {value!r}."
            )
    for name in ("steps_per_epoch", "validation_steps", "steps"):
        if given.get(name) is not None:
            checks.check_int(name, given[name], lowest=1)
    return {"data": data, **given}


def callbacks_of(callbacks: Any, kind: type) -> list[Any]:
    """Returns those of a class.

    Args:
      callbacks: As of `fit`: None, one, several, or a CallbackList of Keras.
      kind: The class.
    """
    return [
        one
        for one in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
        if isinstance(one, kind)
    ]


def prediction_error() -> ValueError:
    """What to raise where `predict` is given `Datasets`."""
    return ValueError(
        "Argument `x` of `predict` must be arrays or a tf.data.Dataset over "
        "parameter servers, which this process reads in order. Received: "
        "tlm.ps.Datasets, whose batches end in any order."
    )
