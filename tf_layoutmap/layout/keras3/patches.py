"""The places where Keras asks us: patched once, inert without a scope."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private, _tf_private
from tf_layoutmap.layout.keras3 import (
    backend_ops,
    embedding_rows,
    layer_calls,
    lora_saving,
    random_numbers,
)
from tf_layoutmap.layout.keras3 import metrics as mesh_metrics
from tf_layoutmap.layout.keras3 import optimizers as keras3_optimizers
from tf_layoutmap.layout.keras3 import step as keras3_step
from tf_layoutmap.layout.keras3.context import active_home, home_of_new_variable
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import datasets
from tf_layoutmap.layout.processes import checks as process_checks
from tf_layoutmap.layout.tf_ops import recurrent

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Patches Keras, the first time it is called."""
    global _installed
    with _lock:
        if _installed:
            return
        keras.Variable.__new__ = staticmethod(_new_variable)
        layer = keras.layers.Layer
        layer.__new__ = staticmethod(_new_layer(layer.__new__))
        _wrap(layer, "__call__", layer_calls.call)
        _wrap(keras.layers.Embedding, "call", embedding_rows.embedding_call)
        for kind in (keras.layers.Dense, keras.layers.EinsumDense):
            _wrap(kind, "_get_kernel_with_merged_lora", lora_saving.merged)
        _wrap(keras.layers.Embedding, "_get_embeddings_with_merged_lora",
              lora_saving.merged)
        _wrap(tf.experimental.dtensor.DTensorDataset, "__iter__",
              datasets.iterate)
        _wrap(_tf_private.DTensorIterator, "__next__",
              datasets.get_next)
        trainer = _keras_private.TensorFlowTrainer
        _wrap(trainer, "make_train_function",
              keras3_step.make_train_function)
        _wrap(trainer, "make_test_function", keras3_step.make_test_function)
        _wrap(trainer, "make_predict_function",
              keras3_step.make_predict_function)
        _wrap(_keras_private.BaseTrainer, "get_metrics_result",
              keras3_step.get_metrics_result)
        _wrap(_keras_private.TFEpochIterator, "catch_stop_iteration",
              process_checks.of_epoch)
        _wrap(_keras_private.BaseOptimizer, "build", keras3_optimizers.build)
        # Which of them scales losses looks at all gradients first.
        for kind in (_keras_private.BaseOptimizer,
                     _keras_private.LossScaleOptimizer):
            _wrap(kind, "apply", keras3_optimizers.apply)
        _wrap(keras.optimizers.Adagrad, "update_step",
              keras3_optimizers.adagrad_step)
        for name in ("assign", "assign_add", "assign_sub"):
            _wrap(_keras_private.TFOptimizer, name,
                  getattr(keras3_optimizers, name))
        for name in ("divide", "true_divide"):
            _wrap(_keras_private.backend_numpy, name, keras3_optimizers.divide)
        _wrap(_keras_private.backend_numpy, "einsum", backend_ops.einsum)
        _wrap(_keras_private.backend_numpy, "add", backend_ops.add)
        _wrap(_keras_private.backend_numpy, "eye", backend_ops.eye)
        _wrap(_keras_private.backend, "rnn", recurrent.rnn)
        _wrap(_keras_private.backend_numpy, "repeat", backend_ops.repeat)
        for name in ("normal", "truncated_normal", "uniform", "randint"):
            _wrap(_keras_private.backend_random, name, random_numbers.draw)
        _wrap(_keras_private.backend_random, "dropout", random_numbers.dropout)
        _wrap(_keras_private.CompileMetrics, "update_state",
              mesh_metrics.update_state)
        _wrap(_keras_private.backend_numpy, "flip", mesh_metrics.flip)
        _wrap(_keras_private.backend_numpy, "diag", mesh_metrics.diag)
        _wrap(_keras_private.backend_core, "scatter", mesh_metrics.scatter)
        _wrap(_keras_private.backend_nn, "ctc_loss", mesh_metrics.ctc_loss)
        _wrap(_keras_private.backend_nn, "one_hot", mesh_metrics.one_hot)
        _installed = True


def _wrap(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Makes `owner.name(...)` call `ours(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(owner, name, tf.autograph.experimental.do_not_convert(wrapper))


def _new_variable(cls: type, *args: Any, **kwargs: Any) -> Any:
    # Without arguments it is a copy of a variable that is somewhere already.
    if cls is not keras.Variable or not (args or kwargs):
        return object.__new__(cls)
    home, owner, is_state = home_of_new_variable()
    if home is None:
        return object.__new__(cls)
    variable = object.__new__(MeshVariable)
    variable._mesh_home = home
    variable._mesh_owner = owner
    variable._mesh_is_state = is_state
    return variable


def _new_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        layer = original(cls, *args, **kwargs)
        home = active_home()
        if home is not None:
            home.add_layer(layer)
        return layer

    return new
