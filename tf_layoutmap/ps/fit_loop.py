"""`fit` and `evaluate` on parameter servers, for both Keras versions.

The patches in `fit_keras3` and `fit_tf_keras` read the arguments with
`read_arguments`, and call the functions `fit` and `evaluate` of this module.
When a server is lost, a `server_loss_handler` raises an error or restarts the
program.
"""

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
    "BackupAndRestore callback training continues from its last epoch."
)


def server_loss_reporter(strategy: Any, data: Datasets) -> ps_guard.Guard:
    """Returns a guard that raises an error when a server is lost."""
    return ps_guard.Guard(
        connection.processes_of(strategy) or [],
        data.deadline,
        lambda: (0, _REMEDY),
        restarts_program=False,
    )


def server_loss_handler(
    strategy: Any, data: Datasets, backups: Sequence[Any]
) -> ps_guard.Guard:
    """Returns a guard for `fit`, according to `on_server_loss` of `data`.

    Args:
      strategy: Strategy of the model.
      data: Data of `fit`.
      backups: BackupAndRestore callbacks of `fit`.

    Raises:
      ValueError: If `on_server_loss` is `"restart"`, but a restarted program
        could not continue. A restarted program cannot continue without a
        backup, or if the strategy is not from `connect`.
    """
    if data.on_server_loss == "raise":
        return server_loss_reporter(strategy, data)
    processes = connection.processes_of(strategy)
    if processes is None:
        raise ValueError(
            'Argument `on_server_loss` of tlm.ps.Datasets must be "raise" '
            "if the strategy is not from `tlm.ps.connect`, which waits for "
            f'servers. Received: "restart" and {strategy!r}.'
        )
    if len(backups) != 1:
        raise ValueError(
            "Argument `callbacks` of `fit` must have one BackupAndRestore of "
            'the model\'s Keras with on_server_loss="restart" of '
            "tlm.ps.Datasets: the program continues from its saved state. "
            f"Received: {len(backups)}."
        )
    return ps_guard.Guard(
        processes,
        data.deadline,
        lambda: (_last_change(os.fspath(backups[0].backup_dir)), _REMEDY),
        restarts_program=True,
    )


def _last_change(folder: str) -> int:
    """Returns the time of the last write in a folder, in ns; 0 if empty."""
    return max(
        (
            tf.io.gfile.stat(os.path.join(path, name)).mtime_nsec
            for path, _, names in tf.io.gfile.walk(folder)
            for name in names
        ),
        default=0,
    )


# Key of the throughput in the logs, which follows the keys of the metrics.
EXAMPLES = "examples/s"


class KerasVersion(Protocol):
    """Operations that differ between the two Keras versions."""

    def check_compiled(self, model: Any, verb: str) -> None:
        """Raises an error if the model is not compiled."""
        ...

    def steps_per_execution(self, model: Any) -> int:
        """Returns the `steps_per_execution` of a compiled model."""
        ...

    def build(self, model: Any, strategy: Any, element_spec: Any) -> None:
        """Creates all variables of a model whose shapes are known."""
        ...

    def step(self, model: Any, verb: str) -> Any:
        """Returns the step function for `Epochs`."""
        ...

    def update_condition(
        self, model: Any, verb: str
    ) -> Callable[[], tf.Tensor] | None:
        """Returns the argument `condition` of `Epochs`."""
        ...

    def add(self, model: Any, verb: str, steps: list[Any]) -> dict[str, Any]:
        """Adds the results of steps to the metrics, and returns the logs."""
        ...

    def callbacks(self, model: Any, callbacks: Any, **options: Any) -> Any:
        """Returns a `CallbackList`."""
        ...

    def backups(self, callbacks: Any) -> list[Any]:
        """Returns all BackupAndRestore callbacks of `fit`.

        Raises:
          ValueError: If a callback would not write a backup.
        """
        ...

    def start(
        self, model: Any, initial_epoch: int, steps: int | None
    ) -> tuple[int, int]:
        """Returns the first epoch, and the first step in that epoch."""
        ...

    def finish(self, model: Any) -> None:
        """Finalizes moving averages of weights."""
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
    """Trains a model, like `fit` of Keras; returns the `History`."""
    strategy = strategy_of(model, "fit")
    keras.check_compiled(model, "fit")
    guard = server_loss_handler(strategy, data, keras.backups(callbacks))
    train = _epochs(keras, model, data, "train", guard)
    test = (
        _epochs(keras, model, validation_data, "test", guard)
        if (isinstance(validation_data, Datasets))
        else None
    )
    # The guard also covers callbacks and metrics, because they read and write
    # variables on servers.
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
    callback_list = keras.callbacks(
        model,
        callbacks,
        add_history=True,
        add_progbar=verbose != 0,
        verbose=1 if verbose == "auto" else verbose,
        epochs=epochs,
        steps=steps_per_epoch,
    )
    model.stop_training = False
    callback_list.on_train_begin()
    first_epoch, first_step = keras.start(model, initial_epoch, steps_per_epoch)
    logs: dict[str, Any] = {}
    for epoch in range(first_epoch, epochs):
        model.reset_metrics()
        callback_list.on_epoch_begin(epoch)
        logs = _train_epoch(
            keras, model, train, callback_list, first_step, steps_per_epoch
        )
        first_step = 0
        if validation_data is not None and _is_due(validation_freq, epoch):
            test_logs = (
                _evaluate(keras, model, test, callback_list, validation_steps)
                if test
                else (
                    model.evaluate(
                        **_evaluate_arguments(validation_data),
                        callbacks=callback_list,
                        batch_size=validation_batch_size,
                        steps=validation_steps,
                        return_dict=True,
                        verbose=0,
                    )
                )
            )
            logs.update(
                (f"val_{name}", value) for name, value in test_logs.items()
            )
        callback_list.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    if epochs > 0:
        keras.finish(model)
    callback_list.on_train_end(logs)
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
    """Evaluates a model, like `evaluate` of Keras."""
    strategy = strategy_of(model, "evaluate")
    keras.check_compiled(model, "evaluate")
    guard = server_loss_reporter(strategy, data)
    test = _epochs(keras, model, data, "test", guard)

    def run() -> dict[str, Any]:
        keras.build(model, strategy, test.element_spec)
        callback_list = keras.callbacks(
            model,
            callbacks,
            add_progbar=verbose != 0,
            verbose=1 if verbose == "auto" else verbose,
            epochs=1,
            steps=steps,
        )
        return _evaluate(keras, model, test, callback_list, steps)

    logs = guard.call(run)
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values


def _epochs(
    keras: KerasVersion,
    model: Any,
    data: Datasets,
    verb: str,
    guard: ps_guard.Guard,
) -> Epochs:
    """Returns the passes of `fit` or `evaluate` over the datasets."""
    return Epochs(
        model.distribute_strategy,
        data,
        keras.step(model, verb),
        guard,
        _steps_per_closure(keras, model, data),
        keras.update_condition(model, verb),
    )


def _steps_per_closure(
    keras: KerasVersion, model: Any, data: Datasets
) -> int | None:
    """Returns the number of steps of a closure, or None to choose it.

    Raises:
      ValueError: If the model and the datasets have different numbers.
    """
    of_model = keras.steps_per_execution(model)
    if of_model == 1:
        return data.steps_per_closure
    if data.steps_per_closure not in (None, of_model):
        raise ValueError(
            "Argument `steps_per_closure` of tlm.ps.Datasets must be None or "
            "equal to `steps_per_execution` of `compile`. Received: "
            f"{data.steps_per_closure} and {of_model}."
        )
    return of_model


def _train_epoch(
    keras: KerasVersion,
    model: Any,
    train: Epochs,
    callback_list: Any,
    first_step: int,
    num_steps: int | None,
) -> dict[str, Any]:
    logs: dict[str, Any] = {}
    done, seconds, examples = first_step, 0.0, 0
    callback_list.on_train_batch_begin(done)
    for progress in train.run(
        None if num_steps is None else num_steps - first_step
    ):
        logs = _logs(keras, model, "train", progress)
        seconds += progress.seconds
        examples += progress.num_examples
        logs[EXAMPLES] = examples / seconds
        done = first_step + progress.num_steps
        # As in Keras, one call of the callbacks reports several steps. The call
        # contains the index of the last batch.
        callback_list.on_train_batch_end(done - 1, logs)
        if model.stop_training:
            break
        if done != num_steps:
            callback_list.on_train_batch_begin(done)
    _check_not_empty(done > first_step)
    return dict(logs)


def _evaluate(
    keras: KerasVersion,
    model: Any,
    test: Epochs,
    callback_list: Any,
    steps: int | None,
) -> dict[str, Any]:
    callback_list.on_test_begin()
    model.reset_metrics()
    logs: dict[str, Any] = {}
    for progress in test.run(steps):
        callback_list.on_test_batch_begin(progress.num_steps - 1)
        logs = _logs(keras, model, "test", progress)
        callback_list.on_test_batch_end(progress.num_steps - 1, logs)
    _check_not_empty(bool(logs))
    callback_list.on_test_end(logs)
    return logs


def _logs(
    keras: KerasVersion, model: Any, verb: str, progress: Progress
) -> dict[str, Any]:
    return tf.nest.map_structure(
        lambda value: (
            float(value) if np.ndim(value) == 0 else np.asarray(value)
        ),
        keras.add(model, verb, progress.values),
    )


def _check_not_empty(has_batches: bool) -> None:
    if not has_batches:
        raise ValueError(
            "Argument `dataset_fn` of tlm.ps.Datasets must return datasets "
            "with batches. Received: no batch on any worker."
        )


def _is_due(frequency: int | Container[int], epoch: int) -> bool:
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def _evaluate_arguments(data: Any) -> dict[str, Any]:
    """Converts validation data to the arguments of `evaluate`."""
    parts = data if isinstance(data, tuple) else (data,)
    return dict(zip(("x", "y", "sample_weight"), parts))


def strategy_of(model: Any, verb: str) -> Any:
    """Returns the strategy in whose scope a model was created.

    Raises:
      ValueError: If the strategy has no parameter servers, or the model runs
        eagerly.
    """
    strategy = model.distribute_strategy
    if not strategies.on_servers(strategy):
        raise ValueError(
            f"`{verb}` with tlm.ps.Datasets requires a model created in the "
            "scope of a ParameterServerStrategy, as tlm.ps.connect returns. "
            f"Received: a model of {type(strategy).__name__}."
        )
    if model.run_eagerly:
        raise ValueError(
            "A model on parameter servers must be compiled with "
            "run_eagerly=False, because its steps run on workers. Received: "
            "True."
        )
    return strategy


# The first tuple has arguments that are only valid for arrays. The second tuple
# has arguments that have no effect for `Datasets`.
_ARRAY_ARGUMENTS = (
    "y",
    "batch_size",
    "validation_split",
    "class_weight",
    "sample_weight",
)
_IGNORED_ARGUMENTS = (
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
    """Returns the arguments of a call by name; None if `x` is not `Datasets`.

    Args:
      original: The original method of Keras.
      verb: Name of the method.
      model: The called model.
      args: Positional arguments after the model.
      kwargs: Keyword arguments.

    Raises:
      TypeError: If the arguments do not match the method's signature.
      ValueError: If an argument that is only valid for arrays is passed, or a
        number of steps is below 1.
    """
    arguments = (
        inspect.signature(original).bind(model, *args, **kwargs).arguments
    )
    arguments = {**arguments, **arguments.pop("kwargs", {})}
    data = arguments.pop("x", None)
    if not isinstance(data, Datasets):
        return None
    arguments.pop(next(iter(inspect.signature(original).parameters)))
    for name in _IGNORED_ARGUMENTS:
        arguments.pop(name, None)
    for name in _ARRAY_ARGUMENTS:
        value = arguments.pop(name, None)
        if value is not None and not (
            name == "validation_split" and value == 0
        ):
            raise ValueError(
                f"Argument `{name}` of `{verb}` must not be passed with "
                "tlm.ps.Datasets: `dataset_fn` returns batches with targets "
                "and sample weights, (x, y, sample_weight). "
                f"Received: {value!r}."
            )
    for name in ("steps_per_epoch", "validation_steps", "steps"):
        if arguments.get(name) is not None:
            checks.check_int(name, arguments[name], lowest=1)
    return {"data": data, **arguments}


def callbacks_of(callbacks: Any, kind: type) -> list[Any]:
    """Returns the callbacks that are instances of a class.

    Args:
      callbacks: As for `fit`: None, one callback, several callbacks, or a
        `CallbackList`.
      kind: The class.
    """
    return [
        callback
        for callback in tf.nest.flatten(
            getattr(callbacks, "callbacks", callbacks)
        )
        if isinstance(callback, kind)
    ]


def prediction_error() -> ValueError:
    """Returns the error that `predict` raises for `Datasets`."""
    return ValueError(
        "Argument `x` of `predict` on parameter servers must be arrays or a "
        "tf.data.Dataset, which this process reads in order. Received: "
        "tlm.ps.Datasets, whose batches have no fixed order."
    )
