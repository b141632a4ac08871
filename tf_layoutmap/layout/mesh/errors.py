"""TensorFlow's errors about ops that DTensor lacks, as messages for users."""

# DOC-MERGE: Errors of a step on a mesh: raised once, and not again.
#
# By default an operation on a mesh fails on the queue of a device, and the
# program sees the error when it reads a result. The queue also raises it in the
# next operation, which did nothing wrong; after a copy to the mesh it is raised
# forever, and where several devices hold one, TensorFlow frees memory twice and
# the process ends. So operations on a mesh return when all devices are done, and
# raise the cause if there is an error. `queued_error` is for programs that used
# DTensor before this package.
#
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

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh, is_registered

_LACKS = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")
# What DTensor's compiler ends with, and the operation that it stopped at.
_COMPILER = "dtensor_graph_to_mlir_pass"
# Where an eager operation was, which says no more than its name.
_PLACE = re.compile(r"^loc\(.*?\]\): ")
_STOPPED_AT = re.compile(r'see current operation: .*?"tf\.(\w+)"')

# How its compiler prints the type of a string tensor that it cannot exchange.
_STRINGS = "tf_type.string"

_IN_THE_DATA = (
    "{} belongs in the input: make the layer outside the scope and use "
    "dataset.map(lambda x, y: (layer(x), y))."
)

# What in Keras uses an op that DTensor lacks, and what to do instead.
_LOOPS = (
    "The gradient of a loop needs it whose number of steps depends on "
    "values: make it a Python int."
)
_REMEDIES = {
    "EmptyTensorList": _LOOPS,
    "TensorListReserve": _LOOPS,
    "PyFunc": "tf.numpy_function needs it: call it in dataset.map.",
    "EagerPyFunc": "tf.py_function needs it: call it in dataset.map.",
    **{
        op: _IN_THE_DATA.format(what)
        for op, what in {
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
    """A model does what DTensor cannot place on a mesh."""


class LayoutMapWarning(UserWarning):
    """A layout map that does something else than its keys say.

    Keys that match no variable, and operations that every device computes
    whole.
    """


@contextmanager
def explain_error(
    model: Any, kind: str, graph: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Raises TensorFlow's errors about missing ops as one that explains.

    Args:
      model: Whose step runs.
      kind: What it does: `"train"`, `"test"` or `"predict"`.
      graph: Gives the graph of the step, or None; asked after an error only.
    """
    try:
        yield
    except tf.errors.OpError as error:
        sentence = _sentence(str(error), model, kind, graph)
        if sentence is None:
            raise
        raise UnsupportedByDTensorError(sentence) from error


def layer_of(name: str, model: Any) -> str | None:
    """Returns the innermost layer of `model` that an operation is in.

    Args:
      name: Of the operation in the graph of a step.
      model: Of Keras 3 or tf_keras.

    Returns:
      Its quoted name, or several where name scopes do not tell them apart;
      None outside of layers.
    """
    layers = model._flatten_layers(include_self=False)
    names = [layer.name for layer in layers]
    for scope in reversed(name.split("/")[:-1]):
        # TensorFlow numbers scopes that it enters again, so that dense_1
        # may be `dense` as well.
        found = sorted(
            {
                f"{one!r}"
                for one in names
                if re.fullmatch(re.escape(one) + r"(_\d+)?", scope)
            }
        )
        if found:
            return " or ".join(found)
    return None


def stopped_at(error: str) -> str | None:
    """Returns the type of operation that DTensor's compiler stopped at."""
    found = _STOPPED_AT.search(error)
    return None if found is None else found.group(1)


def finding_of(error: str) -> str | None:
    """Returns what DTensor's compiler found; None of another error."""
    if _COMPILER not in error:
        return None
    # The position in the user's code comes first, then the finding.
    finding = (
        error.partition(" error: ")[2].partition("\n")[0]
        or (error.partition("\n")[0])
    )
    return textwrap.shorten(_PLACE.sub("", finding), 160)


def _where(op: str, model: Any, graph: Any) -> str:
    """Returns the layer in whose name scope a graph has `op`, in words."""
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
            "A step on a mesh takes numbers; devices do not exchange strings. "
            f"Received: a string tensor, while model {model.name!r} was to "
            f"{kind}. Look strings up on the host, before the step: call "
            "StringLookup, TextVectorization or FeatureSpace in dataset.map, "
            "and give the model their results."
        )
    lacking = _LACKS.search(error)
    if lacking is not None:
        op = lacking.group(1)
        remedy = _REMEDIES.get(
            op, "Replace the layer, loss or metric that uses it."
        )
        return (
            f"DTensor has no {op} operation on a mesh; model "
            f"{model.name!r} needs one{_where(op, model, graph())} to "
            f"{kind}. {remedy}"
        )
    return _refusal(
        error,
        f"as the layouts of model {model.name!r} ask for; "
        f"it needs one to {kind}",
    )


def error_of_function(
    name: str, error: str, why: str, is_strict: bool
) -> UnsupportedByDTensorError:
    """Returns the error of a function of a user that DTensor refuses.

    Args:
      name: Of the function.
      error: What DTensor's compiler said, if it was asked.
      why: What cannot be divided.
      is_strict: Whether it was not to be computed whole.
    """
    refusal = _refusal(
        error, f"as the layouts of weights ask for; function {name!r} needs one"
    ) or (f"DTensor cannot divide what function {name!r} computes: {why}.")
    return UnsupportedByDTensorError(
        refusal
        + (
            " A LayoutMap with strict=False lets every device compute it whole."
            if is_strict
            else " It cannot compute it whole either: call it on a model "
            "without a mesh, with these weights."
        )
    )


def _refusal(error: str, of_what: str) -> str | None:
    finding = finding_of(error)
    if finding is None:
        return None
    stopped = stopped_at(error)
    op = "an operation" if stopped is None else f"a {stopped} operation"
    return (
        f"DTensor cannot divide {op} {of_what} ({finding}). "
        "Leave the "
        "dimension that the operation works along unsharded in the layout of "
        "the layer before it, or, in a layer, loss or metric of your own, "
        "give its input a layout with tlm.distribution.distribute_tensor."
    )


dtensor = tf.experimental.dtensor

_lock = threading.Lock()


@contextlib.contextmanager
def errors_once(mesh: Mesh) -> Iterator[None]:
    """Raises the error of an operation on a mesh here, and nowhere else."""
    try:
        yield
    except tf.errors.OpError as error:
        # While a function is traced, nothing runs.
        again = queued_error(mesh) if tf.executing_eagerly() else None
        if isinstance(error, tf.errors.CancelledError) and (
            again is not None
            and not isinstance(again, tf.errors.CancelledError)
        ):
            raise again from error
        raise


def queued_error(mesh: Mesh) -> tf.errors.OpError | None:
    """Removes the errors that devices of `mesh` hold, and returns one.

    Returns:
      One of them, a cause first; None without any.
    """
    found = None
    for _ in range(mesh.num_local_devices() + 1):
        try:
            for part in dtensor.unpack(tf.identity(_probe_of(mesh))):
                part.numpy()
            break
        except tf.errors.OpError as error:
            if not isinstance(found, tf.errors.InvalidArgumentError):
                found = error
    return found


def _probe_of(mesh: Mesh) -> Any:
    """Returns a tensor on `mesh` to find errors with, 0.1 ms a time."""
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
    """Lets all groups of devices that reduce on `mesh` connect, once.

    An error of a step in which a group meets for the first time ends all
    collective operations of the process, for good. Later ones do not.
    """
    key = mesh.to_string()
    # Several processes would have to do this at the same time.
    complete = tf_private.kept_with_device("complete_groups")
    if (
        key in complete
        or mesh.num_local_devices() < mesh.size
        or (mesh.size == 1 or not tf.executing_eagerly())
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
            tf.reduce_sum(x, some)
            for n in range(1, len(names) + 1)
            for some in itertools.combinations(axes, n)
        ]

    with dtensor.default_mesh(mesh):
        for total in sums(
            dtensor.pack(
                [np.zeros([1] * len(shape), np.float32)] * mesh.size, layout
            )
        ):
            dtensor.unpack(total)[0].numpy()


def reset_device(original: Callable[..., None], is_async: bool) -> None:
    """Makes DTensor's device, without the queues that keep errors."""
    del is_async
    original(is_async=False)


def copy_to_mesh(
    original: Callable[..., Any],
    tensor: Any,
    layout: Layout,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`dtensor.copy_to_mesh`, which an earlier error does not stop."""
    if (
        tf.executing_eagerly()
        and is_registered(layout.mesh)
        and (not tf_private.has_output_layout())
    ):
        # Of a step whose results nobody has read: raised here, as the copy
        # would, but the next one is made.
        error = queued_error(layout.mesh)
        if error is not None:
            raise error
    return original(tensor, layout, *args, **kwargs)
