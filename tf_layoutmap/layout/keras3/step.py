"""Steps of `fit`, `evaluate` and `predict` of Keras 3, and plain layer calls.

The module contains three groups of functions:

* `call` calls a layer on a mesh, and moves its inputs from the host.
* The `make_*_function` functions return the step that `fit`, `evaluate` and
  `predict` run for each batch.
* `update_state` and the functions after it replace parts of metrics and losses.
  DTensor does not support the original functions, or computes wrong results if
  a sample is sharded. The results match Keras without a mesh.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private, tf_private
from tf_layoutmap.layout import assignments, mesh_step
from tf_layoutmap.layout.keras3 import (
    host_layers,
    host_lookups,
    image_channels,
    optimizers,
)
from tf_layoutmap.layout.keras3.context import (
    activated,
    active_context,
    context_of,
    context_of_model,
    is_planning,
)
from tf_layoutmap.layout.keras3.variable import building_for_step, keeping_trace
from tf_layoutmap.layout.mesh import shard_map, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.mesh_step import MeshStep
from tf_layoutmap.layout.ops import convolutions, gates, simplifications
from tf_layoutmap.layout.replication import replicated_ops, traces

dtensor = tf.experimental.dtensor

_is_inside = ThreadValue(False)


def call_on_host() -> AbstractContextManager[None]:
    """Returns a scope in which `call` moves no inputs to the mesh.

    In this scope, a layer that belongs to a mesh but has no weights on the mesh
    runs on the host.
    """
    return _is_inside.set_to(True)


def call(
    original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls `layer` after moving inputs from the host to the mesh of the layer.

    If any input is on the host, the outputs are replicated, so that user code
    can read them like any other tensor. If all inputs are on the mesh, the
    outputs keep their layouts.
    """
    context = context_of(layer)
    if context is None or keras_private.is_abstract():
        return original(layer, *args, **kwargs)
    if not tf.executing_eagerly():
        return _traced(original, layer, context.mesh, args, kwargs)
    if _is_inside.get():
        with _on_shards(layer):
            return original(layer, *args, **kwargs)
    flat = keras.tree.flatten((args, kwargs))
    if any(isinstance(x, keras.KerasTensor) for x in flat):
        return original(layer, *args, **kwargs)
    from_host = any(transfer.is_host_value(x) for x in flat)
    split = host_layers.host_layers_of(layer) if from_host and args else None
    results: list[Any] = []
    lookups: list[Any] = []
    if split is not None:
        # In the first run of `tf.recompute_grad`, new keys get rows as well.
        with tf_private.resumed_tapes():
            is_training = tf_private.could_possibly_record()
        with call_on_host():
            results, lookups = split.compute(args[0], is_training=is_training)
    with (
        _is_inside.set_to(True),
        tracing.default_mesh(context.mesh),
        replicated_ops.strict_eager_ops(context.layout_map.strict),
    ):
        if from_host:
            # Strings stay on the host, because devices cannot exchange strings,
            # and no layer on the mesh uses them.
            keeps_strings = split is not None or (
                host_lookups.tables_of(layer) is not None
            )
            args, kwargs, results = cast(
                Any,
                keras.tree.map_structure(
                    lambda x: (
                        x
                        if keeps_strings and _is_string(x)
                        else transfer.to_replicated(x, context.mesh)
                    ),
                    (args, kwargs, results),
                ),
            )
        with (
            host_layers.use_host_results(split, results, lookups),
            _on_shards(layer),
        ):
            outputs = original(layer, *args, **kwargs)
        if from_host:
            outputs = keras.tree.map_structure(
                transfer.readable_tensor, outputs
            )
        return outputs


def call_function(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a `tf.function`; discards its trace if only shapes are inferred.

    When Keras calls a layer only to infer shapes, the weights, seeds and
    metrics of a new model have no value, and assignments have no effect. A
    function that kept this trace would never read or write the variables.
    """
    if (
        not tf.executing_eagerly()
        and keras_private.is_abstract()
        and (
            active_context() is not None
            or is_planning.get()
            or any(map(context_of, keras_private.name_scope_callers()))
        )
    ):
        function = function._clone(None)
    return original(function, *args, **kwargs)


def get_concrete_function(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns a concrete function, which must not read a pending variable.

    Raises:
      RuntimeError: If only shapes are inferred, and the function reads a
        variable on a mesh that has no value yet.
    """
    if tf.executing_eagerly() or not keras_private.is_abstract():
        return original(function, *args, **kwargs)
    with keeping_trace.set_to(True):
        return original(function, *args, **kwargs)


def _is_string(x: Any) -> bool:
    return tf.is_tensor(x) and x.dtype == tf.string


def _traced(
    original: Callable[..., Any], layer: Any, mesh: Mesh, args: Any, kwargs: Any
) -> Any:
    """Calls `layer` during tracing; pins samples of some layers as unsharded.

    DTensor supports convolutions only for unsharded kernels and images, and
    recurrent layers only for unsharded features. DTensor propagates layouts
    from later layers backwards, so the layouts of both the inputs and the
    outputs are pinned.
    """
    # A graph that is not traced for a mesh may belong to an exported model,
    # which must also run without a mesh.
    if not tracing.traced_for_mesh():
        return original(layer, *args, **kwargs)
    context = context_of(layer)
    batch_dim = None if context is None else context.batch_dim
    sharded = image_channels.sharded_inputs(layer, args[0]) if args else None
    if sharded is not None:
        inputs, axis = sharded
        outputs = original(layer, inputs, *args[1:], **kwargs)
        return image_channels.gathered(outputs, mesh, batch_dim, axis)
    if not isinstance(layer, assignments.BATCH_PARALLEL):
        return original(layer, *args, **kwargs)
    # TimeDistributed moves the time dimension to the front, so its tensors
    # cannot keep the sharding of the batch.
    pin: Callable[..., Any] = (
        tracing.pin_replicated
        if isinstance(layer, keras.layers.TimeDistributed)
        else tracing.pin_unsharded_samples
    )
    kernels = _sharded_kernels(layer)
    if context is not None and (
        kernels or assignments.is_sharded_recurrent(layer)
    ):
        pin = functools.partial(tracing.pin_images, batch_dim=batch_dim)
    images = (
        image_channels.input_of_convolution(layer, kernels, args[0])
        if args
        else None
    )
    args, kwargs = cast(
        Any, keras.tree.map_structure(lambda x: pin(x, mesh), (args, kwargs))
    )
    if images is not None:
        args = images, *args[1:]
    with _on_shards(layer):
        outputs = original(layer, *args, **kwargs)
    axis = image_channels.axis_of_result(layer, kernels)
    if axis is not None:
        return image_channels.gathered(outputs, mesh, batch_dim, axis)
    return keras.tree.map_structure(lambda x: pin(x, mesh), outputs)


def _sharded_kernels(layer: Any) -> list[shard_map.ShardedKernel]:
    """Returns the sharded kernels that the call of a layer does not gather."""
    return (
        assignments.sharded_kernels(layer)
        if tracing.traced_for_mesh() and not traces.is_fully_replicated()
        else []
    )


def _on_shards(layer: Any) -> AbstractContextManager[Any]:
    """Returns a context manager that shards a convolution or a recurrent cell.

    A convolution is sharded by channels.
    """
    kernels, context = _sharded_kernels(layer), context_of(layer)
    if context is not None and assignments.is_kind(
        layer, assignments.GATED_CELLS
    ):
        is_sharded = (
            tracing.traced_for_mesh() and not traces.is_fully_replicated()
        )
        return gates.sharded_weights(
            context.mesh,
            context.batch_dim,
            assignments.gate_axes(layer) if is_sharded else None,
        )
    return (
        convolutions.sharded_kernels(context.mesh, context.batch_dim, kernels)
        if context is not None and kernels
        else nullcontext()
    )


# The attribute `is_on_mesh` records whether the model whose `fit`, `evaluate`
# or `predict` started most recently in this thread is on a mesh.
_thread = threading.local()


class _Step(MeshStep):
    """One step of a Keras 3 model on its mesh."""

    def __init__(self, model: Any, context: Any, kind: str):
        """Initializes the step; see `MeshStep`."""
        super().__init__(model, context, kind)
        # Lookups that the host has run for the current batch.
        self._lookups: list[host_lookups.HostLookup] = []
        self._num_discarded = context.registry.num_discarded_traces

    def map_structure(
        self, function: Callable[[Any], Any], structure: Any
    ) -> Any:
        return keras.tree.map_structure(function, structure)

    def __call__(self, batch: Any) -> Any:
        num_discarded = self.context.registry.num_discarded_traces
        if num_discarded != self._num_discarded:
            self._num_discarded = num_discarded
            if not self.model.run_eagerly:
                self._run.discard_traces()
        return super().__call__(self.map_structure(_without_optional, batch))

    def with_host_results(self, batch: Any) -> Any:
        self._lookups = []
        split = host_layers.host_layers_of(self.model)
        if split is None:
            return batch, []
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with call_on_host():
            results, self._lookups = split.compute(
                x, is_training=self.kind == "train"
            )
        return batch, results

    def run(self, batch: Any) -> Any:
        batch, results = batch
        gradients = host_lookups.StepGradients()
        with (
            host_layers.use_host_results(
                host_layers.host_layers_of(self.model), results, self._lookups
            ),
            host_lookups.collecting(gradients),
        ):
            outputs = super().run(batch)
        return outputs, gradients.tensors()

    def finish(self, outputs: Any) -> Any:
        outputs, (gradients, indices) = outputs
        host_lookups.apply_gradients(self._lookups, gradients, indices)
        self._lookups = []
        return outputs

    def prepare(self, batch: Any) -> None:
        planner = self.context.planner
        if planner is not None:
            planner.start_step(self.model, batch)
        with activated(self.context):
            with building_for_step.set_to(True):
                if self.kind == "predict":
                    _build_for_predict(self.model, batch)
                else:
                    _build_for_training(self.model, batch, self.model_step)
            if planner is not None:
                planner.plan_for_step(self.context, self.model)
            self.context.initialize_pending()
        optimizers.move_model_state(self.model, self.context)
        self.context.check_all_patterns_used()


def _over_iterator(step: _Step) -> Callable[[Any], Any]:
    """Returns the function that `fit` calls with an iterator of batches."""

    def function(iterator: Any) -> Any:
        step.use_data(iterator)
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
    """Returns the function that `predict` calls with a list of batches."""

    def function(several: Iterable[Any]) -> Any:
        outputs = []
        for batch in several:
            step.use_data(batch)
            outputs.append(step(step.checks.common_batch(batch)))
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(
            lambda *parts: tf.concat(parts, axis=0), *outputs
        )

    return function


def _check_no_context_is_open(model: Any, kind: str, is_new: bool) -> None:
    """Raises `RuntimeError` for a model that was created before the scope.

    Keras would create the slot variables and metrics of the model on the mesh
    of the scope, but the weights of the model are not on this mesh.
    """
    context = active_context()
    makes_variables = not model.built if kind == "predict" else is_new
    if context is not None and makes_variables:
        raise RuntimeError(
            f"Model {model.name!r} must be created after set_distribution (or "
            "inside the scope) to use the mesh that is active now. Received: "
            f"a model without weights on a mesh, for {kind} on mesh "
            f"{context.mesh.dim_names} of shape {context.mesh.shape()}. Create "
            "the model after set_distribution (or inside the scope); to use "
            "it without a mesh, compile and use it after "
            "set_distribution(None) (or outside the scope)."
        )


def _context_of_run(model: Any) -> Any:
    context = context_of_model(model)
    _thread.is_on_mesh = context is not None
    return context


def data_of_epoch(original: Callable[..., Any], epochs: Any) -> Any:
    """Returns the data of an epoch; on a mesh, disables autotuning for arrays.

    Keras does not pass the model to this function. The function therefore uses
    the model whose `fit`, `evaluate` or `predict` started most recently in this
    thread.
    """
    data = original(epochs)
    if getattr(_thread, "is_on_mesh", False) and isinstance(
        epochs.data_adapter, keras_private.ArrayDataAdapter
    ):
        return mesh_step.without_autotuning(data)
    return data


make_train_function, make_test_function = (
    mesh_step.step_function_maker(
        kind,
        _context_of_run,
        lambda model, context, kind=kind: _over_iterator(
            _Step(model, context, kind)
        ),
        _check_no_context_is_open,
    )
    for kind in ("train", "test")
)
make_predict_function = mesh_step.step_function_maker(
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
    with tracing.default_mesh(context.mesh):
        results = original(model)
    return keras.tree.map_structure(transfer.to_host_tensor, results)


def _build_for_training(
    model: Any, batch: Any, step: Callable[..., Any]
) -> None:
    # A custom step does not have to call the model, and the batch does not have
    # to be a tuple (x, y). The layers that a custom step uses are built while
    # the step is traced.
    is_custom_step = not _is_of_keras(step)
    if is_custom_step and type(model).call is keras.Model.call:
        return
    try:
        model._symbolic_build(data_batch=batch)
    except Exception:
        if not is_custom_step:
            raise


def _is_of_keras(step: Callable[..., Any]) -> bool:
    name = getattr(step, "__name__", "")
    return getattr(step, "__func__", None) is getattr(keras.Model, name, step)


def _build_for_predict(model: Any, batch: Any) -> None:
    if all(layer.built for layer in model._flatten_layers()):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    keras_private.compute_output_spec(
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


# Metrics that use only the position of the largest prediction.
_ACCURACIES = frozenset(
    {keras.metrics.SparseCategoricalAccuracy, keras.metrics.CategoricalAccuracy}
)


def update_state(
    original: Callable[..., Any], metrics: Any, *args: Any, **kwargs: Any
) -> Any:
    """Updates compiled metrics, with unsharded samples.

    Metrics that rank the classes, such as top-k accuracy, require all classes
    of a sample on one device. Accuracies need only the largest prediction of
    each device, so if all metrics are accuracies, the predictions keep their
    layout.
    """
    mesh = tracing.mesh_of_trace()
    if mesh is None:
        return original(metrics, *args, **kwargs)
    batch_dim = tracing.batch_dim_of_trace()
    call = inspect.signature(original).bind(metrics, *args, **kwargs)
    are_accuracies = metrics.built and all(
        type(metric) in _ACCURACIES for metric in metrics.metrics
    )
    for name, value in call.arguments.items():
        if name not in ("self", *(["y_pred"] if are_accuracies else [])):
            call.arguments[name] = keras.tree.map_structure(
                lambda x: tracing.pin_like_a_batch(x, mesh, batch_dim), value
            )
    with simplifications.shards_argmax() if are_accuracies else nullcontext():
        return original(*call.args, **call.kwargs)


def ctc_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Computes the connectionist temporal classification loss, replicated.

    The loss scatters values into a tensor that contains the full batch. DTensor
    shards this tensor, but does not convert the indices to positions in a
    shard.
    """
    mesh = tracing.mesh_of_trace()
    if mesh is not None:
        args, kwargs = cast(
            Any,
            keras.tree.map_structure(
                lambda x: tracing.pin_replicated(x, mesh), (args, kwargs)
            ),
        )
    loss = original(*args, **kwargs)
    return loss if mesh is None else tracing.pin_replicated(loss, mesh)


def one_hot(
    original: Callable[..., Any],
    x: Any,
    num_classes: Any,
    axis: int = -1,
    **kwargs: Any,
) -> Any:
    """Computes `keras.ops.one_hot` with all classes of a sample on one device.

    If the classes of the predictions are sharded, DTensor would propagate this
    layout to the one-hot tensor, whose classes it cannot shard.
    """
    mesh = tracing.mesh_of_trace()
    out = original(x, num_classes, axis=axis, **kwargs)
    return (
        out
        if mesh is None or axis != -1
        else keras.tree.map_structure(
            lambda o: tracing.pin_unsharded_samples(o, mesh), out
        )
    )


def scatter(
    original: Callable[..., Any],
    indices: Any,
    values: Any,
    shape: tuple[int, ...],
) -> Any:
    """Computes `keras.ops.scatter`; on a mesh, as a segment sum.

    On a mesh, an index outside the shape also raises an error.
    """
    mesh = tracing.mesh_of_trace()
    indices = tf.convert_to_tensor(indices)
    values = tf.convert_to_tensor(values)
    if (
        mesh is None
        or not all(isinstance(size, int) for size in shape)
        or (
            indices.shape.rank != 2
            or indices.shape[-1] != len(shape)
            or values.shape.rank != 1
            or not values.dtype.is_numeric
        )
    ):
        return original(indices, values, shape)
    indices = tracing.pin_replicated(tf.cast(indices, tf.int64), mesh)
    values = tracing.pin_replicated(values, mesh)
    sizes = np.array(shape, np.int64)
    num_cells = int(sizes.prod())
    strides = np.append(sizes[1:], 1)[::-1].cumprod()[::-1]
    cells = tf.reduce_sum(indices * strides, axis=-1)
    is_inside = tf.reduce_all((indices >= 0) & (indices < sizes), axis=-1)
    if tf.executing_eagerly():
        # In eager mode, the process ends if an op on a mesh uses a result whose
        # computation failed, so the indices are checked first.
        if not np.all(transfer.to_host(is_inside)):
            raise ValueError(
                f"Argument `indices` must be inside the shape {shape}. "
                f"Received: {transfer.to_host(indices).tolist()}."
            )
    else:
        cells = tf.where(is_inside, cells, num_cells)
    return tf.reshape(
        tf.math.unsorted_segment_sum(values, cells, num_cells), shape
    )


# DTensor does not support ReverseV2, which metrics such as AUC use, or
# MatrixDiagPartV3, which metrics such as IoU use.


def flip(original: Callable[..., Any], x: Any, axis: Any = None) -> Any:
    """Computes `keras.ops.flip`; on a mesh, gathers rows in reverse order."""
    if not tracing.traced_for_mesh():
        return original(x, axis=axis)
    x = tf.convert_to_tensor(x)
    axes = (
        range(x.shape.rank)
        if axis is None
        else ([axis] if isinstance(axis, int) else axis)
    )
    if any(x.shape[a] is None for a in axes):
        return original(x, axis=axis)
    for a in axes:
        x = tf.gather(x, tf.range(x.shape[a] - 1, -1, -1), axis=a)
    return x


def diag(original: Callable[..., Any], x: Any, k: int = 0) -> Any:
    """Computes `keras.ops.diag`; on a mesh, by masked sums of the columns."""
    if not tracing.traced_for_mesh() or k != 0:
        return original(x, k=k)
    x = tf.convert_to_tensor(x)
    if x.shape.rank != 2 or x.shape[0] is None or x.shape[0] != x.shape[1]:
        return original(x, k=k)
    numbers = tf.range(x.shape[0])
    on_diagonal = numbers[:, tf.newaxis] == numbers[tf.newaxis, :]
    return tf.reduce_sum(tf.where(on_diagonal, x, tf.zeros_like(x)), axis=0)
