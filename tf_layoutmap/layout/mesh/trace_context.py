"""For which mesh this thread traces, and what divides its batches."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import graph_optimizer, pinning, step_errors
from tf_layoutmap.layout.mesh.layouts import Mesh, is_own
from tf_layoutmap.layout.mesh.prepare import prepare_process
from tf_layoutmap.layout.mesh.thread_value import ThreadValue

dtensor = tf.experimental.dtensor

# The mesh, and the axis that cuts batches.
_now: ThreadValue[tuple[Mesh | None, str | None]] = ThreadValue((None, None))


@contextlib.contextmanager
def default_mesh(mesh: Mesh, batch_dim: str | None = None) -> Iterator[None]:
    """`dtensor.default_mesh(mesh)`, as layers of ours want it.

    It is reset after an error, where TensorFlow's stays set. And what is traced
    in it is known to be for DTensor, so that layers may pin layouts: use it
    around the step of a custom loop.

    ```python
    with tlm.layout.default_mesh(mesh):
        loss = step(x, y)
    ```

    Args:
      mesh: `dtensor.Mesh`.
      batch_dim: Mesh axis that cuts batches; None if none does.
    """
    prepare_process(mesh)
    error = None
    step_errors.complete_groups(mesh)
    with (
        dtensor.default_mesh(mesh),
        graph_optimizer.switched_off(),
        _now.set_to((mesh, batch_dim)),
    ):
        try:
            yield
        except BaseException as raised:
            error = raised
    if error is not None:
        # Outside of the scope, where devices are asked for more of them.
        with step_errors.errors_once(mesh):
            raise error


def traced_for_mesh() -> bool:
    """Whether this thread is inside `default_mesh` of this module."""
    return mesh_of_trace() is not None


def mesh_of_trace() -> Mesh | None:
    """Returns the mesh of the innermost `default_mesh` here, or None."""
    return _now.get()[0]


def mesh_of_operation() -> Mesh | None:
    """Returns the mesh that an operation is traced for now, or None.

    TensorFlow's own `default_mesh` counts, too, if the mesh was passed to this
    package. What `tf.data` traces runs on the host.
    """
    mesh = mesh_of_trace()
    # TensorFlow forgets to reset the mesh after an error, but not the device.
    if mesh is None and pinning.DEVICE in _tf_private.current_device():
        mesh = dtensor.get_default_mesh()
        if mesh is not None and not is_own(mesh):
            return None
    return None if mesh is not None and _of_a_dataset() else mesh


def batch_dim_of_trace() -> str | None:
    """Returns the mesh axis that cuts the batches of a step, or None."""
    return _now.get()[1]


def batches_undivided() -> contextlib.AbstractContextManager[None]:
    """While open, no axis cuts the batches of what this thread traces."""
    return _now.set_to((mesh_of_trace(), None))


def _of_a_dataset() -> bool:
    """Whether a function of `tf.data` is traced: it runs on the host."""
    # As `Dataset_map_parse`: what `Dataset.map(parse)` calls its function.
    return any(
        getattr(graph, "name", "").startswith("Dataset_")
        for graph in _tf_private.graphs_around()
    )
