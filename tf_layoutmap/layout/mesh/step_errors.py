"""Errors of a step on a mesh: raised once, and not again.

By default an operation on a mesh fails on the queue of a device, and the
program sees the error when it reads a result. The queue also raises it in the
next operation, which did nothing wrong; after a copy to the mesh it is raised
forever, and where several devices hold one, TensorFlow frees memory twice and
the process ends. So operations on a mesh return when all devices are done, and
raise the cause if there is an error. `queued_error` is for programs that used
DTensor before this package.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh.layouts import Layout, Mesh, is_own

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
        probes = _tf_private.kept_with_device("probes")
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
    complete = _tf_private.kept_with_device("complete_groups")
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
        and is_own(layout.mesh)
        and (not _tf_private.has_output_layout())
    ):
        # Of a step whose results nobody has read: raised here, as the copy
        # would, but the next one is made.
        error = queued_error(layout.mesh)
        if error is not None:
            raise error
    return original(tensor, layout, *args, **kwargs)
