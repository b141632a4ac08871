"""The step behind `fit`, `evaluate` and `predict` of a model on a mesh.

Keras keeps its loop, callbacks and logs. Only the function of one step is
ours: it takes a batch from the host, cuts it along the batch axis of the
mesh, runs the model's own `train_step` there, and brings the logs back.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layout.keras3 import move_state
from tf_layoutmap.layout.keras3.context import (
    MeshContext,
    activated,
    active_context,
    context_of_model,
)
from tf_layoutmap.layout.mesh import (
    all_or_nothing,
    batches,
    error_messages,
    step_errors,
    trace_context,
)
from tf_layoutmap.layout.processes import checks as process_checks

dtensor = tf.experimental.dtensor


def make_train_function(original: Callable[..., Any], model: Any,
                        force: bool = False) -> Any:
    """Sets `model.train_function`, for a model on a mesh to our step."""
    context = context_of_model(model)
    if context is None:
        if model.train_function is None or force:
            _check_no_context_is_open(model, "train")
        return original(model, force)
    if model.train_function is None or force:
        model.train_function = _iterator_function(
            model, context, model.train_step)
    return model.train_function


def make_test_function(original: Callable[..., Any], model: Any,
                       force: bool = False) -> Any:
    """Sets `model.test_function`, for a model on a mesh to our step."""
    context = context_of_model(model)
    if context is None:
        if model.test_function is None or force:
            _check_no_context_is_open(model, "test")
        return original(model, force)
    if model.test_function is None or force:
        model.test_function = _iterator_function(
            model, context, model.test_step)
    return model.test_function


def make_predict_function(original: Callable[..., Any], model: Any,
                          force: bool = False) -> Any:
    """Sets `model.predict_function`, for a model on a mesh to our step."""
    context = context_of_model(model)
    if context is None:
        if not model.built:
            _check_no_context_is_open(model, "predict")
        return original(model, force)
    if model.predict_function is None or force:
        step = _MeshStep(model, context, model.predict_step, _build_for_predict)

        def predict_function(batches: Iterable[Any]) -> Any:
            outputs = [step(step.checks.agreed(batch)) for batch in batches]
            if len(outputs) == 1:
                return outputs[0]
            return keras.tree.map_structure(
                lambda *parts: tf.concat(parts, axis=0), *outputs)

        model.predict_function = predict_function
    return model.predict_function


def _check_no_context_is_open(model: Any, verb: str) -> None:
    """Refuses a model made before the scope, whose step would mix both.

    The slot variables and metrics that Keras makes for it would be placed on a
    mesh that the weights are not on.
    """
    context = active_context()
    if context is not None:
        raise RuntimeError(
            f"Model {model.name!r} was made before set_distribution or the "
            "scope that is in force now, so its weights are on no mesh and "
            f"it cannot {verb} on {context.mesh.dim_names} of size "
            f"{context.mesh.shape()}. Make it after set_distribution (or "
            "inside the scope); or, to go on without a mesh, compile and use "
            "it after set_distribution(None) (or outside the scope).")


def get_metrics_result(original: Callable[..., Any], model: Any) -> Any:
    """Returns the results of all metrics, as host tensors."""
    context = context_of_model(model)
    if context is None or not tf.executing_eagerly():
        return original(model)
    with trace_context.default_mesh(context.mesh):
        results = original(model)
    return keras.tree.map_structure(batches.to_host_tensor, results)


def _iterator_function(model: Any, context: MeshContext,
                       step_function: Callable[..., Any]) -> (
        Callable[..., Any]):
    step = _MeshStep(model, context, step_function, _build_for_training)

    def function(iterator: Any) -> Any:
        logs = None
        for _ in range(model.steps_per_execution):
            try:
                batch = step.checks.next_batch(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise StopIteration from None
                break
            logs = step(batch)
        return logs

    return function


class _MeshStep:
    """One step of a model on its mesh, from host batch to host results."""

    def __init__(self, model: Any, context: MeshContext,
                 step_function: Callable[..., Any],
                 build: Callable[[Any, Any, Callable[..., Any]], None]):
        self._model = model
        self._context = context
        self._step_function = step_function
        self._build = build
        self._verb = step_function.__name__.removesuffix("_step")
        self.checks = process_checks.ProcessChecks(
            model, context.mesh, context.batch_dim, self._verb)
        self._ready = False
        # Shapes are kept: DTensor needs to know them, so the last, smaller
        # batch has a trace of its own.
        whole = self._whole_step if self._verb == "train" else step_function
        self._run = step_function if model.run_eagerly else tf.function(
            whole, autograph=False)

    def __call__(self, batch: Any) -> Any:
        batch = keras.tree.map_structure(_without_optional, batch)
        if not self._ready:
            # Before the trace, on the mesh: a variable that a trace creates
            # would start anew with every trace.
            with activated(self._context):
                self._build(self._model, batch, self._step_function)
                self._context.initialize_pending()
            move_state.move_model_state(self._model, self._context)
            self._context.check_all_patterns_used()
            self._ready = True
        self.checks.compare_model()
        batch = keras.tree.map_structure(
            lambda x: batches.to_batch(
                x, self._context.mesh, self._context.batch_dim),
            batch)
        with self.checks.running(), step_errors.errors_once(self._context.mesh):
            with trace_context.default_mesh(
                    self._context.mesh, self._context.batch_dim), (
                        error_messages.explained(
                            self._model, self._verb,
                            lambda: self._graph(batch))):
                outputs = self._run(batch)
            # Errors of a step arrive with what is read of it.
            return keras.tree.map_structure(batches.to_host_tensor, outputs)

    def _whole_step(self, batch: Any) -> Any:
        with all_or_nothing.whole_step(self._context.mesh):
            return self._step_function(batch)

    def _graph(self, batch: Any) -> Any:
        """Returns the graph that ran for `batch`, or None without one."""
        if self._model.run_eagerly:
            return None
        try:
            return self._run.get_concrete_function(batch).graph
        except Exception:  # The trace itself failed, which is told already.
            return None


def _build_for_training(model: Any, batch: Any,
                        step: Callable[..., Any]) -> None:
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


def _build_for_predict(model: Any, batch: Any,
                       step: Callable[..., Any]) -> None:
    del step
    if all(layer.built for layer in model._flatten_layers()):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    _keras_private.compute_output_spec(
        model, keras.tree.map_structure(
            lambda v: None if v is None else keras.KerasTensor(
                v.shape, keras.backend.standardize_dtype(v.dtype)), x),
        training=False)


def _without_optional(x: Any) -> Any:
    return None if isinstance(x, tf.experimental.Optional) else x




