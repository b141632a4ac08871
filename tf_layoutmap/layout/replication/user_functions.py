"""Runs a `tf.function` of user code that reads weights on a mesh.

Examples are `generate` of keras-hub's models, and the step of a custom training
loop. The function is traced for the mesh of the weights. If DTensor cannot
shard the function, which is known only after its compilation, the function is
traced once more and replicated.
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

# Attribute of a function with the object that runs it on a mesh.
_RUN = "_layoutmap_run"


def call(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a `tf.function`, on a mesh if it reads weights on a mesh.

    Args:
      original: `Function.__call__`.
      function: A `tf.function`.
      *args: Arguments of the function.
      **kwargs: Keyword arguments of the function.

    Raises:
      UnsupportedByDTensorError: If DTensor cannot shard the function, and it
        cannot be replicated, or the layout map is strict.
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
                # The original function keeps the trace that was ended.
                run.copy = function._clone(None)
        else:
            run = _OnMesh(original, function, mesh, is_strict=False)
    outputs = run(args, kwargs)
    setattr(function, _RUN, run)
    return outputs


class _OnMesh:
    """Runs one function on a mesh, sharded if DTensor supports it."""

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
            # The program has set the mesh itself and gets DTensors.
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
        unsupported = errors.error_of_function(
            self._name, str(error), why, self._is_strict
        )
        if self._is_strict:
            raise unsupported from error
        reads, function = GatheredReads(), self._function._clone(None)
        try:
            outputs = self._run_replicated(reads, function, args, kwargs)
        except Exception:
            # The first error is raised, because it describes the layouts, which
            # the user can change.
            raise unsupported from error
        self._reads, self.copy = reads, function
        warnings.warn(
            f"DTensor cannot shard function {self._name!r}. Every device "
            f"computes {report.report_of_function(reads, why)}.",
            errors.LayoutMapWarning,
            stacklevel=6,
        )
        return outputs


@contextlib.contextmanager
def _mesh_only(mesh: Mesh) -> Iterator[None]:
    """Sets TensorFlow's default mesh, without an axis that shards batches."""
    with dtensor.default_mesh(mesh), graph_optimizer.switched_off():
        yield
