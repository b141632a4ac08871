"""`fit` and `evaluate` of tf_keras on parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private
from tf_layoutmap.ps import fit_loop


class TfKeras:
    """Operations of the loops in `fit_loop` for tf_keras.

    A metric of tf_keras updates each of its variables with one op on a server.
    Several workers can therefore update the same metric.
    """

    def check_compiled(self, model: Any, verb: str) -> None:
        """Raises `RuntimeError` if the model is not compiled."""
        if model.compiled_loss is None:
            raise RuntimeError(f"`compile` must be called before `{verb}`.")

    def steps_per_execution(self, model: Any) -> int:
        """Returns the `steps_per_execution` of a compiled model.

        Raises:
          ValueError: If tf_keras would change the number during `fit`.
        """
        if model.autotune_steps_per_execution:
            raise ValueError(
                "Argument `steps_per_execution` of `compile` must be a number "
                "for a model on parameter servers. Received: 'auto'."
            )
        return int(model.steps_per_execution.numpy())

    def build(self, model: Any, strategy: Any, element_spec: Any) -> None:
        """Creates slot variables.

        The first trace creates all other variables.
        """
        del element_spec
        build = getattr(model.optimizer, "build", None)
        if build is not None and model.built:
            with strategy.scope():
                build(model.trainable_variables)

    def step(self, model: Any, verb: str) -> Callable[[Any], list[tf.Tensor]]:
        """Returns a function that runs a step and returns no values."""
        step = getattr(model, f"{verb}_step")

        def without_logs(batch: Any) -> list[tf.Tensor]:
            logs = step(batch)
            metric_names = {metric.name for metric in model.metrics}
            if not isinstance(logs, dict) or not set(logs) <= metric_names:
                raise ValueError(
                    f"`{verb}_step` on parameter servers must return the "
                    "results of the model's metrics, "
                    f"{sorted(metric_names)}, because other values of one step "
                    "are not aggregated. Received: "
                    f"{logs!r}."
                )
            if verb == "train":
                tf_keras_private.count_step(model)
            return []

        return tf.autograph.experimental.do_not_convert(without_logs)

    def update_condition(self, model: Any, verb: str) -> None:
        """Returns None: optimizers of tf_keras do not accumulate gradients."""
        del model, verb

    def add(
        self, model: Any, verb: str, steps: list[list[np.ndarray]]
    ) -> dict[str, Any]:
        """Returns the results of the metrics."""
        del verb, steps
        return model.get_metrics_result()

    def callbacks(self, model: Any, callbacks: Any, **options: Any) -> Any:
        """Returns a `CallbackList`."""
        if isinstance(callbacks, tf_keras.callbacks.CallbackList):
            return callbacks
        return tf_keras.callbacks.CallbackList(
            callbacks, model=model, **options
        )

    def backups(self, callbacks: Any) -> list[Any]:
        """Returns all BackupAndRestore callbacks."""
        backups = fit_loop.callbacks_of(
            callbacks, tf_keras.callbacks.BackupAndRestore
        )
        for callback in backups:
            if callback.save_freq != "epoch":
                raise ValueError(
                    "Argument `save_freq` of BackupAndRestore must be "
                    '"epoch" on parameter servers, where tf_keras skips '
                    f"all other backups. Received: {callback.save_freq!r}."
                )
        return backups

    def start(
        self, model: Any, initial_epoch: int, steps: int | None
    ) -> tuple[int, int]:
        """Returns first epoch and step: from a backup, or `initial_epoch`."""
        return tf_keras_private.start_of_backup(model, steps, initial_epoch)

    def finish(self, model: Any) -> None:
        """Finalizes moving averages of weights."""
        if isinstance(model.optimizer, tf_keras.optimizers.Optimizer):
            model.optimizer.finalize_variable_values(model.trainable_variables)


_TF_KERAS = TfKeras()


def fit(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Trains with `Datasets`. Calls the original method for other data."""
    options = fit_loop.read_arguments(original, "fit", model, args, kwargs)
    if options is not None:
        return fit_loop.fit(_TF_KERAS, model, **options)
    return original(model, *args, **kwargs)


def evaluate(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Evaluates `Datasets`. Calls the original method for other data."""
    options = fit_loop.read_arguments(original, "evaluate", model, args, kwargs)
    if options is not None:
        return fit_loop.evaluate(_TF_KERAS, model, **options)
    return original(model, *args, **kwargs)


def predict(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Raises for `Datasets`. Calls the original method for other data."""
    options = fit_loop.read_arguments(original, "predict", model, args, kwargs)
    if options is not None:
        raise fit_loop.prediction_error()
    return original(model, *args, **kwargs)
