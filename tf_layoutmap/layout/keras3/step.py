"""The step behind `fit`, `evaluate` and `predict` of Keras 3 on a mesh."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layout.keras3 import host_layers, layer_calls, move_state
from tf_layoutmap.layout.keras3.context import (
    activated,
    active_context,
    context_of_model,
)
from tf_layoutmap.layout.mesh import batches, trace_context
from tf_layoutmap.layout.step import autotuning, step_functions
from tf_layoutmap.layout.step.mesh_step import MeshStep

# Of this thread: `is_on_mesh`, whether the model is whose `fit`, `evaluate` or
# `predict` began last.
_thread = threading.local()


class _Step(MeshStep):
    """One step of a Keras 3 model on its mesh."""

    def map_structure(
        self, function: Callable[[Any], Any], structure: Any
    ) -> Any:
        return keras.tree.map_structure(function, structure)

    def __call__(self, batch: Any) -> Any:
        return super().__call__(self.map_structure(_without_optional, batch))

    def with_host_results(self, batch: Any) -> Any:
        split = host_layers.of_model(self.model)
        if split is None:
            return batch, []
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with layer_calls.on_host():
            return batch, split.compute(x)

    def run(self, batch: Any) -> Any:
        batch, results = batch
        with host_layers.given(host_layers.of_model(self.model), results):
            return super().run(batch)

    def prepare(self, batch: Any) -> None:
        with activated(self.context):
            if self.kind == "predict":
                _build_for_predict(self.model, batch)
            else:
                _build_for_training(self.model, batch, self.model_step)
            self.context.initialize_pending()
        move_state.move_model_state(self.model, self.context)
        self.context.check_all_patterns_used()


def _over_iterator(step: _Step) -> Callable[[Any], Any]:
    """Returns a function that takes the batches of one call from `fit`."""

    def function(iterator: Any) -> Any:
        logs = None
        for _ in range(step.model.steps_per_execution):
            try:
                batch = step.checks.next_batch(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise StopIteration from None
                break
            logs = step(batch)
        return logs

    return function


def _over_batches(step: _Step) -> Callable[[Iterable[Any]], Any]:
    """Returns a function that predicts some batches."""

    def function(several: Iterable[Any]) -> Any:
        outputs = [step(step.checks.agreed(batch)) for batch in several]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(
            lambda *parts: tf.concat(parts, axis=0), *outputs
        )

    return function


def _check_no_context_is_open(model: Any, kind: str, is_new: bool) -> None:
    """Refuses a model made before the scope, whose step would mix both.

    The slot variables and metrics that Keras makes for it would be placed on a
    mesh that the weights are not on.
    """
    context = active_context()
    makes_variables = not model.built if kind == "predict" else is_new
    if context is not None and makes_variables:
        raise RuntimeError(
            f"Model {model.name!r} was made before set_distribution or the "
            "scope that is in force now, so its weights are on no mesh and "
            f"it cannot {kind} on {context.mesh.dim_names} of size "
            f"{context.mesh.shape()}. Make it after set_distribution (or "
            "inside the scope); or, to go on without a mesh, compile and use "
            "it after set_distribution(None) (or outside the scope)."
        )


def _context_of_run(model: Any) -> Any:
    context = context_of_model(model)
    _thread.is_on_mesh = context is not None
    return context


def data_of_epoch(original: Callable[..., Any], epochs: Any) -> Any:
    """Returns what Keras iterates over; it does not say for which model."""
    data = original(epochs)
    if getattr(_thread, "is_on_mesh", False) and isinstance(
        epochs.data_adapter, _keras_private.ArrayDataAdapter
    ):
        return autotuning.without_autotuning(data)
    return data


make_train_function, make_test_function = (
    step_functions.maker(
        kind,
        _context_of_run,
        lambda model, context, kind=kind: _over_iterator(
            _Step(model, context, kind)
        ),
        _check_no_context_is_open,
    )
    for kind in ("train", "test")
)
make_predict_function = step_functions.maker(
    "predict",
    _context_of_run,
    lambda model, context: _over_batches(_Step(model, context, "predict")),
    _check_no_context_is_open,
)


def get_metrics_result(original: Callable[..., Any], model: Any) -> Any:
    """Returns the results of all metrics, as host tensors."""
    context = context_of_model(model)
    if context is None or not tf.executing_eagerly():
        return original(model)
    with trace_context.default_mesh(context.mesh):
        results = original(model)
    return keras.tree.map_structure(batches.to_host_tensor, results)


def _build_for_training(
    model: Any, batch: Any, step: Callable[..., Any]
) -> None:
    # A step of its own need not call the model, nor know the batch as (x, y):
    # what it uses is built while it is traced.
    own_step = not _is_of_keras(step)
    if own_step and type(model).call is keras.Model.call:
        return
    try:
        model._symbolic_build(data_batch=batch)
    except Exception:
        if not own_step:
            raise


def _is_of_keras(step: Callable[..., Any]) -> bool:
    name = getattr(step, "__name__", "")
    return getattr(step, "__func__", None) is getattr(keras.Model, name, step)


def _build_for_predict(model: Any, batch: Any) -> None:
    if all(layer.built for layer in model._flatten_layers()):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    _keras_private.compute_output_spec(
        model,
        keras.tree.map_structure(
            lambda v: (
                None
                if v is None
                else keras.KerasTensor(
                    v.shape, keras.backend.standardize_dtype(v.dtype)
                )
            ),
            x,
        ),
        training=False,
    )


def _without_optional(x: Any) -> Any:
    return None if isinstance(x, tf.experimental.Optional) else x
