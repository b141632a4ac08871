"""A user's `tf.function` that reads weights on a mesh: traced for that mesh.

`generate` of keras-hub's models is one, and so is the step of a loop of one's
own. What DTensor cannot divide of it is not known before it compiles, so then
the function is traced once more, and all of it is computed whole.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import errors, graph_optimizer, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import TraceAgain, TraceStage
from tf_layoutmap.layout.replication import report, retrace
from tf_layoutmap.layout.replication.gathered_reads import GatheredReads

dtensor = tf.experimental.dtensor

# The attribute of a function with what is called in its place.
_RUN = "_layoutmap_run"


def call(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a `tf.function`; on a mesh if it reads weights that are there.

    Args:
      original: `Function.__call__`.
      function: What `tf.function` returned.
      *args: Its arguments.
      **kwargs: Its arguments by name.

    Raises:
      UnsupportedByDTensorError: DTensor cannot even compute it whole, or a
        strict layout map does not want it so.
    """
    if not tf.executing_eagerly() or retrace.is_step_function(function):
        return original(function, *args, **kwargs)
    run = getattr(function, _RUN, None)
    if run is None:
        mesh = tracing.mesh_of_operation()
        if mesh is None:
            try:
                with tracing.at_stage(TraceStage.UNKNOWN):
                    return original(function, *args, **kwargs)
            except TraceAgain as found:
                run = _OnMesh(original, function, found.mesh, found.is_strict)
                # The trace that was ended stays with the original.
                run.copy = function._clone(None)
        else:
            run = _OnMesh(original, function, mesh, is_strict=False)
    outputs = run(args, kwargs)
    setattr(function, _RUN, run)
    return outputs


class _OnMesh:
    """A function for a mesh: divided as long as DTensor can do it."""

    def __init__(
        self,
        original: Callable[..., Any],
        function: Any,
        mesh: Mesh,
        is_strict: bool,
    ):
        self._original = original
        self._function = function
        self._mesh = mesh
        self._is_strict = is_strict
        self._name = getattr(function.python_function, "__name__", "function")
        self.copy = function
        self._reads: GatheredReads | None = None

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if tracing.mesh_of_operation() is not None:
            # The user has said so, and takes results as they come.
            return self._run(args, kwargs, None)
        return tf.nest.map_structure(
            transfer.readable_tensor, self._run(args, kwargs, self._mesh)
        )

    def _run(self, args: Any, kwargs: Any, mesh: Mesh | None) -> Any:
        if self._reads is None:
            try:
                return self._run_sharded(args, kwargs, mesh)
            except TraceAgain as found:
                why, error = found.why or "", None
            except tf.errors.OpError as raised:
                finding = errors.finding_of(str(raised))
                if finding is None:
                    raise
                why, error = finding, raised
            return self._run_replicated_first_time(args, kwargs, why, error)
        return self._run_replicated(self._reads, self.copy, args, kwargs)

    def _run_sharded(self, args: Any, kwargs: Any, mesh: Mesh | None) -> Any:
        if mesh is None:
            return self._original(self.copy, *args, **kwargs)
        with (
            tracing.default_mesh(mesh),
            tracing.at_stage(TraceStage.ON_MESH, self._is_strict),
        ):
            return self._original(self.copy, *args, **kwargs)

    def _run_replicated(
        self, reads: GatheredReads, function: Any, args: Any, kwargs: Any
    ) -> Any:
        args, kwargs = retrace.replicated_arguments(args, kwargs)
        with (
            _mesh_only(self._mesh),
            tracing.at_stage(TraceStage.REPLICATED),
            reads.applied(),
        ):
            return self._original(function, *args, **kwargs)

    def _run_replicated_first_time(
        self, args: Any, kwargs: Any, why: str, error: Any
    ) -> Any:
        refusal = errors.error_of_function(
            self._name, str(error), why, self._is_strict
        )
        if self._is_strict:
            raise refusal from error
        reads, function = GatheredReads(), self._function._clone(None)
        try:
            outputs = self._run_replicated(reads, function, args, kwargs)
        except Exception:
            # What it was refused for first is what the user can change.
            raise refusal from error
        self._reads, self.copy = reads, function
        warnings.warn(
            f"DTensor cannot divide what function {self._name!r} computes. "
            "Every device computes "
            f"{report.report_of_function(reads, why)}.",
            errors.LayoutMapWarning,
            stacklevel=6,
        )
        return outputs


@contextlib.contextmanager
def _mesh_only(mesh: Mesh) -> Iterator[None]:
    """TensorFlow's own `default_mesh`: nothing is known to be divided."""
    with dtensor.default_mesh(mesh), graph_optimizer.switched_off():
        yield
