"""The places where tf_keras asks us: patched once, inert without a scope.

tf_keras has DTensor code of its own, which wants a mesh for each optimizer and
metric, and batches that are on the mesh. Here one scope does all of it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap import _tf_keras_private
from tf_layoutmap.layout.mesh import trace_context
from tf_layoutmap.layout.processes import checks as process_checks
from tf_layoutmap.layout.tf_keras import mapping as tf_keras_mapping
from tf_layoutmap.layout.tf_keras import optimizers as tf_keras_optimizers
from tf_layoutmap.layout.tf_keras import step as tf_keras_step
from tf_layoutmap.layout.tf_keras import variable as tf_keras_variable
from tf_layoutmap.layout.tf_keras.step import TfKerasMap, home_of
from tf_layoutmap.layout.tf_ops import recurrent

_lock = threading.Lock()
_installed = False


@contextlib.contextmanager
def scope(home: Any) -> Iterator[None]:
    """Models of tf_keras made in this thread belong to `home`."""
    install()
    experimental = tf_keras.backend.experimental
    # DTensor places the state of a generator; it cannot place legacy ops.
    had_generator = experimental.is_tf_random_generator_enabled()
    before = _tf_keras_private.layout_map_in_use()
    experimental.enable_tf_random_generator()
    _tf_keras_private.use_layout_map(TfKerasMap(home))
    try:
        yield
    finally:
        _tf_keras_private.use_layout_map(before)
        if not had_generator:
            experimental.disable_tf_random_generator()


def install() -> None:
    """Patches tf_keras, the first time it is called."""
    global _installed
    with _lock:
        if _installed:
            return
        layer, model = tf_keras.layers.Layer, tf_keras.Model
        _wrap(layer, "add_weight", _add_weight)
        _wrap(model, "__init__", _init_model)
        _wrap(layer, "__call__", tf_keras_step.call_layer)
        _wrap(model, "__call__", tf_keras_step.call_model)
        _wrap(model, "build", tf_keras_step.build_model)
        _wrap(model, "compile", tf_keras_step.compile_model)
        _wrap(model, "make_train_function",
              tf_keras_step.make_train_function)
        _wrap(model, "make_test_function",
              tf_keras_step.make_test_function)
        _wrap(model, "make_predict_function",
              tf_keras_step.make_predict_function)
        _wrap(_tf_keras_private.DataHandler, "catch_stop_iteration",
              process_checks.of_epoch)
        _wrap(_tf_keras_private.LayerNormalization, "_fused_can_be_used",
              _can_be_fused)
        optimizer = _tf_keras_private.Optimizer
        _wrap(optimizer, "add_variable_from_reference",
              tf_keras_optimizers.add_slot)
        _wrap(optimizer, "apply_gradients",
              tf_keras_optimizers.apply_gradients)
        _wrap(optimizer, "_deduplicate_sparse_grad",
              tf_keras_optimizers.deduplicate)
        _wrap(optimizer, "_internal_apply_gradients",
              tf_keras_optimizers.update)
        _wrap(_tf_keras_private.backend, "_assign_value_to_variable",
              _assign_value)
        _wrap(_tf_keras_private.backend, "rnn", recurrent.rnn)
        for module, kind in _tf_keras_private.GPU_RECURRENT_LAYERS.items():
            _wrap(module, f"{kind}_with_backend_selection",
                  recurrent.without_gpu(getattr(module, f"standard_{kind}")))
        # tf_keras calls them when a model has its layers, and when a
        # subclassed model has been called for the first time.
        for name in ("_map_functional_model_variable",
                     "_map_subclass_model_variable"):
            _wrap(_tf_keras_private.LAYOUT_MODULE, name, _map_model)
        _installed = True


def _wrap(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Makes `owner.name(...)` call `ours(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(owner, name, tf.autograph.experimental.do_not_convert(wrapper))


def _add_weight(original: Callable[..., Any], layer: Any, *args: Any,
                **kwargs: Any) -> Any:
    """Makes a weight without a value while a layout map waits for its name."""
    if isinstance(layer, tf_keras.metrics.Metric) or kwargs.get("layout") or (
            not isinstance(_tf_keras_private.layout_map_in_use(), TfKerasMap)):
        return original(layer, *args, **kwargs)
    with _tf_keras_private.lazy_init_scope():
        weight = original(layer, *args, **kwargs)
    tf_keras_mapping.draw_seed(getattr(weight, "_variable", weight))
    return weight


def _init_model(original: Callable[..., Any], model: Any, *args: Any,
                **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    home = home_of(model)
    if home is not None:
        home.registry.layers.add(model)


def _can_be_fused(original: Callable[..., Any], layer: Any,
                  *args: Any) -> bool:
    # The fused operation is one that DTensor lacks, with the same result.
    on_mesh = trace_context.traced_for_mesh() or isinstance(
        _tf_keras_private.layout_map_in_use(), TfKerasMap)
    return not on_mesh and original(layer, *args)


def _map_model(original: Callable[..., Any], model: Any,
               layout_map: Any) -> Any:
    if not isinstance(layout_map, TfKerasMap):
        return original(model, layout_map)
    # An inner model's weights have their names when the outer one is built.
    if not tf_keras_step.is_building():
        tf_keras_mapping.map_model(model, home_of(model))
    return model


def _assign_value(original: Callable[..., Any], variable: Any,
                  value: Any) -> Any:
    if isinstance(variable, tf_keras_variable.HostReadableVariable):
        return variable.assign(value)
    return original(variable, value)
