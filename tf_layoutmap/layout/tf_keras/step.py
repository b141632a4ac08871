"""`fit`, `evaluate`, `predict` and plain calls of tf_keras models on a mesh.

The loop, callbacks and logs are tf_keras' own. One step is ours: it cuts a
batch from the host along the batch axis, runs the model's own `train_step` on
the mesh, and brings the logs back.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap import _tf_keras_private
from tf_layoutmap.layout.mesh import (
    all_or_nothing,
    batches,
    error_messages,
    pinning,
    step_errors,
    trace_context,
)
from tf_layoutmap.layout.mesh import batches as mesh_batches
from tf_layoutmap.layout.plan import layer_limits
from tf_layoutmap.layout.processes import checks as process_checks
from tf_layoutmap.layout.tf_keras import mapping as tf_keras_mapping
from tf_layoutmap.layout.tf_keras import optimizers as tf_keras_optimizers

dtensor = tf.experimental.dtensor

_state = threading.local()


class TfKerasMap:
    """What tf_keras holds as its layout map: the context of a model."""

    def __init__(self, context: Any):
        self.context = context

    def get_default_mesh(self) -> Any:
        """Returns the mesh for counters, losses and metrics."""
        return self.context.mesh

    def __deepcopy__(self, memo: dict) -> "TfKerasMap":
        return self


def context_of(model: Any) -> Any:
    """Returns the context of a tf_keras model, or None."""
    layout_map = getattr(model, "_layout_map", None)
    return layout_map.context if isinstance(layout_map, TfKerasMap) else None


def is_building() -> bool:
    """Whether this thread traces a model only to make its weights."""
    return getattr(_state, "building", False)


@contextlib.contextmanager
def _flag(name: str) -> Iterator[None]:
    before = getattr(_state, name, False)
    setattr(_state, name, True)
    try:
        yield
    finally:
        setattr(_state, name, before)


@contextlib.contextmanager
def _using(layout_map: Any) -> Iterator[None]:
    before = _tf_keras_private.layout_map_in_use()
    _tf_keras_private.use_layout_map(layout_map)
    try:
        yield
    finally:
        _tf_keras_private.use_layout_map(before)


def build(model: Any, inputs: Any) -> None:
    """Makes the weights of `model` for inputs like these, on its mesh."""
    is_pending = tf_keras_mapping.is_pending
    if model.built and not any(map(is_pending, model.weights)):
        return
    if not model.built:
        def trace(inputs: Any) -> Any:
            return tf_keras.layers.Layer.__call__(
                model, inputs, training=False) if _takes_training(model) else (
                    tf_keras.layers.Layer.__call__(model, inputs))

        specs = tf.nest.map_structure(
            lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), inputs)
        with _using(model._layout_map), _flag("building"):
            tf.function(trace, autograph=False).get_concrete_function(specs)
    tf_keras_mapping.map_model(model, context_of(model))
    context_of(model).check_all_patterns_used()


def _takes_training(model: Any) -> bool:
    return bool(getattr(model, "_expects_training_arg", False))


def build_model(original: Callable[..., Any], model: Any, *args: Any,
                **kwargs: Any) -> Any:
    """Builds from shapes; weights get their values at the end."""
    if context_of(model) is None or is_building():
        return original(model, *args, **kwargs)
    with _using(model._layout_map), _flag("building"):
        result = original(model, *args, **kwargs)
    tf_keras_mapping.map_model(model, context_of(model))
    return result


def call_model(original: Callable[..., Any], model: Any, *args: Any,
               **kwargs: Any) -> Any:
    """Calls `model`, with tensors from the host or on the mesh."""
    context = context_of(model)
    if context is None:
        return original(model, *args, **kwargs)
    if is_building() or not tf.executing_eagerly():
        # tf_keras' own call would build the weights of an inner model here.
        return tf_keras.layers.Layer.__call__(model, *args, **kwargs)
    flat = tf.nest.flatten((args, kwargs))
    if any(tf_keras.backend.is_keras_tensor(x) for x in flat if
           tf.is_tensor(x)) or getattr(_state, "calling", False):
        return tf_keras.layers.Layer.__call__(model, *args, **kwargs)
    inputs = args[0] if args else kwargs["inputs"]
    build(model, tf.nest.map_structure(_with_shape, inputs))
    from_host = any(batches.is_host_value(x) for x in flat)
    with _flag("calling"), trace_context.default_mesh(context.mesh):
        if from_host:
            args, kwargs = tf.nest.map_structure(
                lambda x: mesh_batches.replicated(x, context.mesh),
                (args, kwargs))
        outputs = tf_keras.layers.Layer.__call__(model, *args, **kwargs)
        return tf.nest.map_structure(
            mesh_batches.readable, outputs) if from_host else outputs


def _with_shape(x: Any) -> Any:
    return x if tf.is_tensor(x) else np.asarray(x)


def call_layer(original: Callable[..., Any], layer: Any, *args: Any,
               **kwargs: Any) -> Any:
    """Calls a layer; on a mesh keeps some layers batch-parallel."""
    if not trace_context.traced_for_mesh() or tf.executing_eagerly() or (
            not layer_limits.is_kind(layer, layer_limits.BATCH_PARALLEL)):
        return original(layer, *args, **kwargs)
    mesh = getattr(_state, "mesh", None)
    if mesh is None:
        return original(layer, *args, **kwargs)
    args, kwargs = tf.nest.map_structure(
        lambda x: pinning.whole_samples(x, mesh), (args, kwargs))
    return tf.nest.map_structure(
        lambda x: pinning.whole_samples(x, mesh),
        original(layer, *args, **kwargs))


def compile_model(original: Callable[..., Any], model: Any, *args: Any,
                  **kwargs: Any) -> Any:
    """Compiles; moves the optimizer's counters to the mesh."""
    result = original(model, *args, **kwargs)
    context = context_of(model)
    if context is not None and model.optimizer is not None:
        tf_keras_optimizers.move_to_mesh(model.optimizer, context.mesh)
    return result


def make_train_function(original: Callable[..., Any], model: Any,
                        force: bool = False) -> Any:
    """Sets `model.train_function`, for a model on a mesh to our step."""
    if context_of(model) is None:
        return original(model, force)
    if model.train_function is None or force:
        model.train_function = _over_iterator(
            model, _Step(model, model.train_step, model._train_counter))
    return model.train_function


def make_test_function(original: Callable[..., Any], model: Any,
                       force: bool = False) -> Any:
    """Sets `model.test_function`, for a model on a mesh to our step."""
    if context_of(model) is None:
        return original(model, force)
    if model.test_function is None or force:
        model.test_function = _over_iterator(
            model, _Step(model, model.test_step, model._test_counter))
    return model.test_function


def make_predict_function(original: Callable[..., Any], model: Any,
                          force: bool = False) -> Any:
    """Sets `model.predict_function`, for a model on a mesh to our step."""
    if context_of(model) is None:
        return original(model, force)
    if model.predict_function is None or force:
        step = _Step(model, model.predict_step, model._predict_counter)
        model.predict_function = lambda iterator: step(
            step.checks.next_batch(iterator))
    return model.predict_function


def _over_iterator(model: Any, step: "_Step") -> Callable[[Any], Any]:
    def function(iterator: Any) -> Any:
        steps = model._steps_per_execution
        logs = None
        for _ in range(1 if steps is None else int(steps.numpy())):
            logs = step(step.checks.next_batch(iterator))
        return logs

    return function


class _Step:
    """One step of a model on its mesh, from host batch to host results."""

    def __init__(self, model: Any, step: Callable[..., Any], counter: Any):
        self._model = model
        self._context = context_of(model)
        self._verb = step.__name__.removesuffix("_step")
        self.checks = process_checks.ProcessChecks(
            model, self._context.mesh, self._context.batch_dim, self._verb)
        self._ready = False

        def run(batch: Any) -> Any:
            if self._verb != "train":
                outputs = step(batch)
                counter.assign_add(1)
                return outputs
            with all_or_nothing.whole_step(self._context.mesh):
                outputs = step(batch)
                counter.assign_add(1)
            return outputs

        # Shapes are kept, as for Keras 3: DTensor must know them.
        self._run = run if model.run_eagerly else tf.function(run)

    def __call__(self, batch: Any) -> Any:
        mesh = self._context.mesh
        if not self._ready:
            self._prepare(batch)
        self.checks.compare_model()
        batch = tf.nest.map_structure(
            lambda x: mesh_batches.to_batch(
                x, mesh, self._context.batch_dim), batch)
        _state.mesh = mesh
        try:
            with self.checks.running(), step_errors.errors_once(mesh):
                with trace_context.default_mesh(mesh), error_messages.explained(
                        self._model, self._verb):
                    outputs = self._run(batch)
                return tf.nest.map_structure(
                    mesh_batches.to_host_tensor, outputs)
        finally:
            _state.mesh = None

    def _prepare(self, batch: Any) -> None:
        model = self._model
        x, _, _ = tf_keras.utils.unpack_x_y_sample_weight(batch)
        build(model, x)
        if self._verb == "train" and model.optimizer is not None:
            tf_keras_optimizers.build(
                model.optimizer, model.trainable_variables, self._context.mesh)
        self._ready = True
