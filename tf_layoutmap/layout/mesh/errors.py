"""Errors of steps on a mesh: clear messages, and no repeated errors.

`explain_error` converts TensorFlow's errors about ops that DTensor does not
support to messages with a remedy.

By default, each device runs ops from a queue, and the program gets the error of
an op only when it reads a result. The queues have three disadvantages:

* The queue raises the error again in the next op, which did not cause it.
* If the error occurs before a copy to the mesh, every later op raises this
  error.
* If the queues of several devices contain an error, TensorFlow frees memory
  twice, which ends the process.

Therefore, this package runs ops on a mesh synchronously: an op returns when all
devices are done, and raises its own error (`reset_device`, `errors_once`). If a
program used DTensor before this package, its device has queues. `queued_error`
removes the errors in these queues.
"""

import contextlib
import itertools
import re
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh, is_registered

_LACKS = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")
# Errors of DTensor's compiler contain this text.
_COMPILER = "dtensor_graph_to_mlir_pass"
# Number of characters of a message of the compiler that users see. The rest is
# the program that the compiler could not shard.
_MAX_SHOWN = 2000
# Matches the location of an eager op. A location contains only the name of the
# op.
_PLACE = re.compile(r"^loc\(.*?\]\): ")
# Attribute that is added to operations with their name in the graph, because
# the compiler's errors do not contain this name.
NAME_ATTRIBUTE = "_layoutmap_name"
_NAME = re.compile(NAME_ATTRIBUTE + r' = "([^"]+)"')
# Matches the type of the op at which the compiler stopped.
_STOPPED_AT = re.compile(r'see current operation: .*?"tf\.(\w+)"')

# The compiler's name for the type of string tensors, which devices cannot
# exchange.
_STRINGS = "tf_type.string"

# The compiler's reason if the sizes of a tensor are unknown during tracing.
_NOT_STATIC = "shape is not static"


def in_the_data(user: str) -> str:
    """Returns the remedy for a layer that must preprocess the data."""
    return (
        f"{user} must run in the input pipeline: create the layer outside the "
        "scope and use dataset.map(lambda x, y: (layer(x), y))."
    )


# Maps each unsupported op to the Keras feature that uses it, and to a remedy.
_LOOPS = (
    "The gradient of a loop whose number of steps depends on tensor values "
    "needs it: make the number of steps a Python int."
)
_REMEDIES = {
    "EmptyTensorList": _LOOPS,
    "TensorListReserve": _LOOPS,
    "DebugNumericSummaryV2": (
        "tf.debugging.enable_check_numerics uses it: call "
        "tf.debugging.check_numerics on single tensors, or use "
        "keras.callbacks.TerminateOnNaN."
    ),
    "PyFunc": "tf.numpy_function uses it: call it in dataset.map.",
    "EagerPyFunc": "tf.py_function uses it: call it in dataset.map.",
    **{
        op: in_the_data(user)
        for op, user in {
            "LookupTableFindV2": "A lookup of strings or integers",
            "AsString": "Hashing",
            "StringToHashBucketFast": "Hashing",
            "StringToHashBucketStrong": "Hashing",
            "StringLower": "TextVectorization",
            "StaticRegexReplace": "TextVectorization",
            "StringSplitV2": "TextVectorization",
        }.items()
    },
}


class UnsupportedByDTensorError(NotImplementedError):
    """Error for a model or function that DTensor cannot run on a mesh."""

    # AutoGraph keeps the type of an exception only with this constructor.
    __init__ = Exception.__init__


class LayoutMapWarning(UserWarning):
    """Warning that a layout of a layout map is not used.

    Examples are keys that match no variable, and operations that are
    replicated because DTensor cannot shard them.
    """


@contextmanager
def explain_error(
    model: Any, kind: str, graph: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Converts TensorFlow's error about an unsupported op to a clear message.

    Args:
      model: Model whose step runs.
      kind: Step of the model: `"train"`, `"test"` or `"predict"`.
      graph: Function that returns the graph of the step, or None. The function
        is called only after an error.

    Raises:
      UnsupportedByDTensorError: If DTensor does not support an op of the step.
    """
    try:
        yield
    except tf.errors.OpError as error:
        sentence = _sentence(str(error), model, kind, graph)
        if sentence is None:
            raise
        raise UnsupportedByDTensorError(sentence) from without_program(error)


@contextmanager
def explain_batch_error() -> Iterator[None]:
    """Converts the error about a tensor on a mesh beside a sparse tensor.

    A generator can yield a batch of tensors on a mesh. If the batch also
    contains a sparse or ragged tensor, TensorFlow copies all tensors of the
    batch to the CPU, which it does not support for a mesh.

    Raises:
      TypeError: If a batch of a dataset contains such tensors.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if not (
            "IteratorGetNext" in error.message
            and "copy a tensor to a non-CPU device" in error.message
        ):
            raise
        raise TypeError(
            "A batch for a model on a mesh must consist of dense tensors. "
            "Received: a batch of a generator or PyDataset with a sparse or "
            "ragged tensor and a tensor on a mesh. Use `.to_tensor()` or "
            "tf.sparse.to_dense."
        ) from without_program(error)


def parse_message(
    original: Callable[..., Any], message: str
) -> tuple[str, list[Any], list[Any]]:
    """Finds the tags `{{type name}}` in the message of an error.

    TensorFlow's own function tries its pattern at each character, up to the end
    of the message. With the programs that DTensor's compiler adds to its
    messages, this can take hours.

    Args:
      original: `error_interpolation.parse_message`.
      message: Message of a failed function, of any length.

    Returns:
      The message without its tags of functions, the tags of functions, and the
      other tags.
    """
    del original
    parts, functions, nodes = [], [], []
    start = 0
    for first, end, tag in tf_private.tags_of_error(message):
        if tag.type == "function_node":
            parts.append(message[start:first])
            functions.append(tag)
        else:
            parts.append(message[start:end])
            nodes.append(tag)
        start = end
    return "".join([*parts, message[start:]]), functions, nodes


def without_program(error: tf.errors.OpError | None) -> Any:
    """Returns `error`, whose message ends before the compiled program."""
    if error is not None and len(error.message) > _MAX_SHOWN:
        tf_private.shorten_message(
            error,
            f"{error.message[:_MAX_SHOWN]}... (the message has "
            f"{len(error.message)} characters)",
        )
    return error


def layer_of(name: str, model: Any) -> str | None:
    """Returns the innermost layer of `model` that contains an operation.

    Args:
      name: Name of the operation in the graph of a step.
      model: Model of Keras 3 or tf_keras.

    Returns:
      The quoted name of the layer. If the name scope matches several layers,
      their names. None if no layer contains the operation.
    """
    layers = model._flatten_layers(include_self=False)
    names = [layer.name for layer in layers]
    for scope in reversed(name.split("/")[:-1]):
        # TensorFlow appends a number to the name of a scope that is entered
        # again, so the scope dense_1 may belong to the layer `dense`.
        matches = sorted(
            {
                f"{name!r}"
                for name in names
                if re.fullmatch(re.escape(name) + r"(_\d+)?", scope)
            }
        )
        if matches:
            return " or ".join(matches)
    return None


def stopped_at(error: str) -> str | None:
    """Returns the type of the op at which DTensor's compiler stopped."""
    match = _STOPPED_AT.search(error)
    return None if match is None else match.group(1)


def operation_named_in(error: str) -> str | None:
    """Returns the name of the op at which the compiler stopped, or None."""
    match = _NAME.search(error)
    return None if match is None else match.group(1)


def finding_of(error: str) -> str | None:
    """Returns the reason that DTensor's compiler gives in an error, or None."""
    if _COMPILER not in error:
        return None
    # The message starts with the position in user code; the reason follows.
    finding = (
        error.partition(" error: ")[2].partition("\n")[0]
        or (error.partition("\n")[0])
    )
    return textwrap.shorten(_PLACE.sub("", finding)[:_MAX_SHOWN], 160)


def _where(op: str, model: Any, graph: Any) -> str:
    """Returns " in layer ..." for the first op of type `op` in a layer."""
    for operation in () if graph is None else graph.get_operations():
        layer = operation.type == op and layer_of(operation.name, model)
        if layer:
            return f" in layer {layer}"
    return ""


def _sentence(
    error: str, model: Any, kind: str, graph: Callable[[], Any]
) -> str | None:
    if _STRINGS in error:
        return (
            "Tensors of a step on a mesh must be numeric, because devices "
            "cannot exchange strings. Received: a string tensor in the "
            f"{kind} step of model {model.name!r}. Process strings on the "
            "host, before the step: call StringLookup, TextVectorization or "
            "FeatureSpace in dataset.map, and pass their results to the model."
        )
    lacking = _LACKS.search(error)
    if lacking is not None:
        op = lacking.group(1)
        remedy = _REMEDIES.get(
            op, "Replace the layer, loss or metric that uses it."
        )
        return (
            f"DTensor does not support the operation {op} on a mesh; model "
            f"{model.name!r} uses it{_where(op, model, graph())} in its "
            f"{kind} step. {remedy}"
        )
    name = operation_named_in(error)
    layer = None if name is None else layer_of(name, model)
    return _compiler_sentence(
        error,
        ("" if layer is None else f"of layer {layer} ")
        + f"as the layouts of model {model.name!r} require, in its {kind} step",
    )


def error_of_function(
    name: str, error: str, why: str, is_strict: bool
) -> UnsupportedByDTensorError:
    """Returns the error for a function of user code that DTensor cannot shard.

    Args:
      name: Name of the function.
      error: Error message of DTensor's compiler, or any other message if the
        compiler did not run.
      why: Reason why the function cannot be sharded.
      is_strict: Whether the layout map does not allow replication.
    """
    sentence = _compiler_sentence(
        error, f"in function {name!r} as the layouts of its weights require"
    ) or (f"DTensor cannot shard function {name!r}: {why}.")
    return UnsupportedByDTensorError(
        sentence
        + (
            " Use a LayoutMap with strict=False to replicate the function."
            if is_strict
            else " DTensor cannot run the replicated function either: call it "
            "on a model without a mesh, with these weights."
        )
    )


def _compiler_sentence(error: str, context: str) -> str | None:
    finding = finding_of(error)
    if finding is None:
        return None
    stopped = stopped_at(error)
    op = "an operation" if stopped is None else f"a {stopped} operation"
    remedy = (
        "The shape depends on the values of the batch. "
        + in_the_data("A preprocessing layer with this operation")
        + " Replace any other layer, loss or metric that uses it."
        if _NOT_STATIC in finding
        else "In the layout of the layer before it, leave the dimension along "
        "which the operation works unsharded; or, in a custom layer, loss or "
        "metric, set the layout of its input with "
        "tlm.distribution.distribute_tensor."
    )
    return f"DTensor cannot shard {op} {context} ({finding}). {remedy}"


dtensor = tf.experimental.dtensor

_lock = threading.Lock()


@contextlib.contextmanager
def errors_once(mesh: Mesh) -> Iterator[None]:
    """Clears the queues after an error, so that the error is raised once."""
    try:
        yield
    except tf.errors.OpError as error:
        # No op runs during tracing, so the error is not from a queue.
        again = queued_error(mesh) if tf.executing_eagerly() else None
        if isinstance(error, tf.errors.CancelledError) and (
            again is not None
            and not isinstance(again, tf.errors.CancelledError)
        ):
            raise again from error
        raise


def queued_error(mesh: Mesh) -> tf.errors.OpError | None:
    """Removes the queued errors of the devices of `mesh`.

    Returns:
      One of the errors, preferably an `InvalidArgumentError`; None if there is
      none.
    """
    queued = None
    for _ in range(mesh.num_local_devices() + 1):
        try:
            for part in dtensor.unpack(tf.identity(_probe_of(mesh))):
                part.numpy()
            break
        except tf.errors.OpError as error:
            if not isinstance(queued, tf.errors.InvalidArgumentError):
                queued = error
    return queued


def _probe_of(mesh: Mesh) -> Any:
    """Returns a tensor on `mesh`; copying this tensor raises queued errors."""
    key = mesh.to_string()
    with _lock:
        probes = tf_private.kept_with_device("probes")
        if key not in probes:
            probes[key] = dtensor.pack(
                [np.zeros([1], np.float32)] * mesh.num_local_devices(),
                dtensor.Layout.replicated(mesh, 1),
            )
        return probes[key]


def complete_groups(mesh: Mesh) -> None:
    """Runs one reduction per group of devices of `mesh`, on the first call.

    The first tensor or function on a mesh calls this function, before any
    operation that can fail.

    If a step fails while a group of devices communicates for the first time,
    all later collective operations of the process fail. After one successful
    reduction, a failed step does not have this effect.
    """
    key = mesh.to_string()
    # With several processes, this function does nothing, because all processes
    # would have to call it at the same time.
    complete = tf_private.kept_with_device("complete_groups")
    if (
        key in complete
        or mesh.num_local_devices() < mesh.size
        or (mesh.size == 1 or not tf.executing_eagerly())
        or tf_private.has_output_layout()
    ):
        return
    complete[key] = True
    names = mesh.dim_names
    shape = [mesh.dim_size(name) for name in names]
    layout = dtensor.Layout(names, mesh)

    @tf.function(autograph=False)
    def sums(x: Any) -> Any:
        axes = range(len(names))
        return [
            tf.reduce_sum(x, reduced)
            for n in range(1, len(names) + 1)
            for reduced in itertools.combinations(axes, n)
        ]

    with dtensor.default_mesh(mesh), ops.hide_info_logs():
        for total in sums(
            dtensor.pack(
                [np.zeros([1] * len(shape), np.float32)] * mesh.size, layout
            )
        ):
            dtensor.unpack(total)[0].numpy()


def reset_device(original: Callable[..., None], is_async: bool) -> None:
    """Creates DTensor's device without queues, because queues repeat errors."""
    del is_async
    original(is_async=False)


def copy_to_mesh(
    original: Callable[..., Any],
    tensor: Any,
    layout: Layout,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `dtensor.copy_to_mesh` after the queued errors are removed."""
    if (
        tf.executing_eagerly()
        and is_registered(layout.mesh)
        and (not tf_private.has_output_layout())
    ):
        # If a step failed and the program has not read its results, its error
        # is still queued. The error is raised here, as in TensorFlow's own
        # copy, but the next copy succeeds.
        error = queued_error(layout.mesh)
        if error is not None:
            raise error
    return original(tensor, layout, *args, **kwargs)
