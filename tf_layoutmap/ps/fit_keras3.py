"""Patches of `fit`, `evaluate` and `predict` of Keras 3 for servers.

`Keras3` contains the operations of the loops in `fit_loop` for Keras 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import (
    accumulation,
    files,
    keras_private,
    strategies,
)
from tf_layoutmap.ps import fit_accumulation, fit_loop


class Keras3:
    """Operations of the loops in `fit_loop` for Keras 3.

    Metrics of Keras 3 read a variable, and then write the new sum. If two
    workers update a metric at the same time, one update is lost. In each step,
    the metrics therefore start from zero, and the coordinator adds the results
    of all steps.
    """

    def check_compiled(self, model: Any, verb: str) -> None:
        """Raises `ValueError` if the model is not compiled."""
        if not model.compiled:
            raise ValueError(f"`compile` must be called before `{verb}`.")

    def steps_per_execution(self, model: Any) -> int:
        """Returns the `steps_per_execution` of a compiled model."""
        return model.steps_per_execution

    def build(self, model: Any, strategy: Any, element_spec: Any) -> None:
        """Creates weights, metrics and slot variables."""
        with strategy.scope():
            keras_private.build_all(model, element_spec)

    def step(self, model: Any, verb: str) -> Callable[[Any], list[tf.Tensor]]:
        """Returns a function that runs a step and returns metric variables."""
        step = getattr(model, f"{verb}_step")

        def counting(
            batch: Any, applies: bool | None = None
        ) -> list[tf.Tensor]:
            variables = _metric_variables(model)
            with (
                accumulation.fixed(applies),
                keras_private.values_in_a_trace(variables),
                keras_private.added_at_once(_counters(model)),
            ):
                logs = step(batch)
                _check_logs(model, logs, verb)
                return [
                    tf.convert_to_tensor(variable.value)
                    for variable in variables
                ]

        return tf.autograph.experimental.do_not_convert(counting)

    def update_condition(
        self, model: Any, verb: str
    ) -> Callable[[], tf.Tensor] | None:
        """Returns a function that computes whether a step applies gradients."""
        return fit_accumulation.condition_of(model) if verb == "train" else None

    def add(
        self, model: Any, verb: str, steps: list[list[np.ndarray]]
    ) -> dict[str, Any]:
        """Adds the metric values of steps to the metrics."""
        del verb
        for number, variable in enumerate(_metric_variables(model)):
            value = variable.numpy()
            # The values are added in the order of the steps. The result is
            # therefore bitwise identical to a run in one process.
            for values in steps:
                value = value + values[number]
            variable.assign(value)
        return model.get_metrics_result()

    def callbacks(self, model: Any, callbacks: Any, **options: Any) -> Any:
        """Returns a `CallbackList`."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        return keras.callbacks.CallbackList(callbacks, model=model, **options)

    def backups(self, callbacks: Any) -> list[Any]:
        """Returns all BackupAndRestore callbacks."""
        return fit_loop.callbacks_of(
            callbacks, keras.callbacks.BackupAndRestore
        )

    def start(
        self, model: Any, initial_epoch: int, steps: int | None
    ) -> tuple[int, int]:
        """Returns the first epoch: from a backup, or `initial_epoch`."""
        del steps
        return keras_private.epoch_of_backup(model) or initial_epoch, 0

    def finish(self, model: Any) -> None:
        """Finalizes moving averages of weights."""
        if isinstance(model.optimizer, keras.optimizers.Optimizer):
            model.optimizer.finalize_variable_values(model.trainable_weights)


def _metric_variables(model: Any) -> list[Any]:
    variables = model.metrics_variables
    other = [
        variable.path for variable in variables if variable.aggregation != "sum"
    ]
    if other:
        raise ValueError(
            "Metrics on parameter servers must have variables with "
            'aggregation="sum", because the values of all workers are added. '
            f"Received: {other}."
        )
    return variables


def _counters(model: Any) -> list[Any]:
    """Returns the step counters of all optimizers in a model and its layers."""
    counters = []
    for optimizer in (
        model.optimizer,
        *(
            getattr(layer, "optimizer", None)
            for layer in keras_private.layers_of(model)
        ),
    ):
        while isinstance(optimizer, keras.optimizers.Optimizer):
            counter = keras_private.step_counter_of(optimizer)
            if not any(other is counter for other in counters):
                counters.append(counter)
            optimizer = getattr(optimizer, "inner_optimizer", None)
    return counters


def _check_logs(model: Any, logs: Any, verb: str) -> None:
    metric_names = set(model.get_metrics_result())
    if not isinstance(logs, dict) or set(logs) != metric_names:
        raise ValueError(
            f"`{verb}_step` on parameter servers must return the results of "
            f"the model's metrics, {sorted(metric_names)}, because other "
            "values of one step are not aggregated. Use metrics, and return "
            f"`get_metrics_result()`. Received: {logs!r}."
        )


_KERAS3 = Keras3()


def fit(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Trains with `Datasets`.

    On servers, `fit` with other data raises an error.
    """
    options = fit_loop.read_arguments(original, "fit", model, args, kwargs)
    if options is not None:
        return fit_loop.fit(_KERAS3, model, **options)
    if strategies.on_servers(model.distribute_strategy):
        raise ValueError(
            "Argument `x` must be tlm.ps.Datasets for a model on parameter "
            "servers, because each worker creates the dataset that it reads."
        )
    return original(model, *args, **kwargs)


def evaluate(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Evaluates `Datasets` on workers, and other data in this process."""
    options = fit_loop.read_arguments(original, "evaluate", model, args, kwargs)
    if options is not None:
        return fit_loop.evaluate(_KERAS3, model, **options)
    return _run_in_coordinator(original, model, args, kwargs)


def predict(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Predicts in the coordinator. Raises an error for `Datasets`."""
    options = fit_loop.read_arguments(original, "predict", model, args, kwargs)
    if options is not None:
        raise fit_loop.prediction_error()
    return _run_in_coordinator(original, model, args, kwargs)


_WEIGHTS = ".weights.h5"


def save_weights(
    original: Callable[..., Any],
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    max_shard_size: Any = None,
) -> Any:
    """Writes weights to a temporary file, and renames the complete file."""
    path = (
        os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    )
    if (
        not path.endswith(_WEIGHTS)
        or not strategies.on_servers(model.distribute_strategy)
        or
        # The next three cases are left to Keras, which prompts the user, raises
        # an error, or uses a temporary file itself.
        not overwrite
        or "://" in path
        or max_shard_size is not None
    ):
        return original(model, filepath, overwrite, max_shard_size)
    with files.replacing_file(path) as temporary:
        original(model, temporary)
    return None


def _run_in_coordinator(
    original: Callable[..., Any], model: Any, args: Any, kwargs: Any
) -> Any:
    if not strategies.on_servers(model.distribute_strategy):
        return original(model, *args, **kwargs)
    # The strategy cannot distribute datasets, so this process computes the
    # model and reads all variables.
    with keras_private.without_strategy(model):
        return original(model, *args, **kwargs)
