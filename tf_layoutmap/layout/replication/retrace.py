"""Traces a step function again with more of its operations replicated.

If DTensor's compiler fails, the error names the operation at which the compiler
stopped. `RetracedFunction` then traces the function again with unsharded
samples for this operation. If this trace also fails, the inputs and results of
the operation are replicated (`traces.Replication`). If the operation cannot be
identified, the full function is replicated. In this case, only the stored
weights stay sharded.

A `tf.function` of user code that reads weights on a mesh, for example
`generate` of a keras-hub model, is retraced in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops, user_warnings
from tf_layoutmap.layout.mesh import device_mesh, errors, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import TraceAgain, TraceStage
from tf_layoutmap.layout.ops import host_loops
from tf_layoutmap.layout.replication import empty_tensors, measured, report
from tf_layoutmap.layout.replication.traces import Replication

# Attribute that is set on each `tf.function` that a `RetracedFunction` calls.
_IS_STEP = "_layoutmap_is_step"


class RetracedFunction:
    """A `tf.function` of a model on a mesh that is retraced if DTensor fails.

    DTensor raises an error during compilation, before anything is computed. The
    function is then traced again with more operations replicated. The
    replicated operations are recorded in `report`.
    """

    def __init__(
        self, make: Callable[[], Any], model: Any, kind: str, context: Any
    ):
        """Initializes the function; nothing is traced before the first call.

        Args:
          make: Function that returns a new `tf.function`.
          model: Model whose layers are named in messages.
          kind: Step of the model, for example `"train"`.
          context: `MeshContext` of the model. If its layout map is strict,
            replicated operations raise an error.
        """
        self.model = model
        self.kind = kind
        self._make = make
        self._function = self._new_function()
        self._mesh = context.mesh
        self._context = context
        self._is_strict = getattr(context.layout_map, "strict", False)
        self._replication = Replication()
        # Graphs that were checked for a strict layout map, and contain no
        # replicated operations.
        self._accepted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its results."""
        while True:
            if self._replication.why_full is not None:
                args, kwargs = replicated_arguments(args, kwargs)
            try:
                with self._replication.traced(self._mesh):
                    if self._is_strict:
                        self._raise_if_replicated(*args, **kwargs)
                    outputs = self._function(*args, **kwargs)
            except tf.errors.OpError as error:
                if self._is_strict or not self._should_retrace(
                    error, functools.partial(self.graph, *args, **kwargs)
                ):
                    raise
                self._function = self._new_function()
                continue
            num_traces = self._function.experimental_get_tracing_count()
            if num_traces > self._num_reported_traces:
                self._num_reported_traces = num_traces
                self._record(self._concrete_function(*args, **kwargs))
            return outputs

    def trace(self, *args: Any, **kwargs: Any) -> None:
        """Traces the function without running it.

        Errors of TensorFlow are ignored, because the next call raises them
        again, and can handle them. All other errors come from the user's code.
        They are raised here, because a second trace after an error can give
        another result.
        """
        with (
            self._replication.traced(self._mesh),
            contextlib.suppress(tf.errors.OpError),
        ):
            self._function.get_concrete_function(*args, **kwargs)

    def discard_traces(self) -> None:
        """Discards all traces, so that the next call traces again."""
        self._function = self._new_function()

    def _new_function(self) -> Any:
        # Number of traces of the function whose replicated operations were
        # recorded.
        self._num_reported_traces = 0
        function = self._make()
        setattr(function, _IS_STEP, True)
        return function

    def _should_retrace(
        self, error: tf.errors.OpError, graph: Callable[[], Any]
    ) -> bool:
        """Returns whether to trace again with more operations replicated."""
        finding = errors.finding_of(str(error))
        if finding is None or self._replication.why_full is not None:
            return False
        if not self._replication.extend(error, graph):
            self._replication.replicate_fully(finding)
        return True

    def _record(self, function: Any) -> None:
        """Records what a concrete function replicates, after its first call.

        Raises:
          UnsupportedByDTensorError: If the layout map is strict, and the
            compiled program gathers weights.
        """
        replicated = self._replicated_ops(
            None if function is None else function.graph
        )
        report.record(replicated, self.model, self.kind)
        if function is None:
            return
        measured.record(
            self.model,
            self.kind,
            function,
            self._context,
            sum(self._replication.gathered_bytes.values()),
        )
        if self._is_strict:
            report.raise_if_gathered(self.model, self.kind)

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the graph of a call with these arguments, or None."""
        function = self._concrete_function(*args, **kwargs)
        return None if function is None else function.graph

    def _concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function.get_concrete_function(*args, **kwargs)
        except Exception:  # The call of the function raises the error again.
            return None

    def _replicated_ops(self, graph: Any) -> tuple[Any, ...]:
        if self._replication.why_full is not None:
            return (report.report_of_function(self._replication),)
        return (
            ()
            if graph is None
            else report.replicated_ops_of_graph(
                graph, self.model, self._replication.why
            )
        )

    def _raise_if_replicated(self, *args: Any, **kwargs: Any) -> None:
        graph = self.graph(*args, **kwargs)
        if graph is None or graph in self._accepted:
            return
        replicated = self._replicated_ops(graph)
        if replicated:
            raise errors.UnsupportedByDTensorError(
                report.message(replicated, self.model, self.kind)
                + " Use a LayoutMap with strict=False to replicate them."
            )
        self._accepted.add(graph)


def is_step_function(function: Any) -> bool:
    """Returns whether a `tf.function` belongs to a `RetracedFunction`."""
    return hasattr(function, _IS_STEP)


def replicated_arguments(args: Any, kwargs: Any) -> Any:
    """Returns the arguments with all eager tensors on a mesh replicated."""
    return tf.nest.map_structure(
        lambda x: tracing.pin_replicated(x, None) if tracing.on_mesh(x) else x,
        (args, kwargs),
    )


dtensor = tf.experimental.dtensor

# Attribute of a function that holds the object that runs the function on a
# mesh.
_RUN = "_layoutmap_run"


def call(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a `tf.function`; runs it on a mesh if it reads weights on the mesh.

    Args:
      original: `Function.__call__`.
      function: A `tf.function`.
      *args: Arguments of the function.
      **kwargs: Keyword arguments of the function.

    Raises:
      UnsupportedByDTensorError: If DTensor cannot shard the function, and the
        function cannot be replicated or the layout map is strict.
    """
    if not tf.executing_eagerly() or is_step_function(function):
        return original(function, *args, **kwargs)
    run = getattr(function, _RUN, None)
    if run is None:
        mesh = tracing.mesh_of_operation()
        if mesh is None:
            try:
                with tracing.at_stage(TraceStage.UNKNOWN):
                    return original(function, *args, **kwargs)
            except TraceAgain as request:
                run = _OnMesh(
                    original, function, request.mesh, request.is_strict
                )
                # A copy of the function is used, because the original function
                # keeps the incomplete trace.
                run.sharded = host_loops.SplitFunction(
                    original, function, request.context
                )
        else:
            run = _OnMesh(original, function, mesh, is_strict=False)
    outputs = run(args, kwargs)
    setattr(function, _RUN, run)
    return outputs


class _OnMesh:
    """Runs one function on a mesh; replicates it if DTensor cannot shard it."""

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
        self.sharded: Callable[..., Any] = functools.partial(original, function)
        # A copy of the function for fully replicated traces.
        self._replicated: Any = None
        self._replication = Replication()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if empty_tensors.is_called_with_empty_tensor((args, kwargs)):
            return self._function.python_function(*args, **kwargs)
        if tracing.mesh_of_operation() is not None:
            # User code has set a default mesh, so the results are not converted
            # to tensors that are readable without a mesh.
            return self._run(args, kwargs, None)
        outputs = self._run(args, kwargs, self._mesh)
        if self._replication.keeps_layouts:
            return outputs
        return tf.nest.map_structure(transfer.readable_tensor, outputs)

    def _run(self, args: Any, kwargs: Any, mesh: Mesh | None) -> Any:
        if self._replicated is not None:
            return self._run_replicated(
                self._replicated, self._replication, args, kwargs
            )
        try:
            with self._replication.traced(self._mesh):
                return self._run_sharded(args, kwargs, mesh)
        except TraceAgain as request:
            # Either a host variable was moved to the mesh, or a function
            # under `default_mesh` has a loop and can be split.
            if request.why is None:
                self.sharded = host_loops.SplitFunction(
                    self._original, self._function, request.context
                )
                return self._run(args, kwargs, mesh)
            why, error = request.why, None
        except tf.errors.OpError as raised:
            finding = errors.finding_of(str(raised))
            if finding is None:
                raise
            why, error = finding, raised
        return self._run_replicated_first_time(args, kwargs, why, error)

    def _run_sharded(self, args: Any, kwargs: Any, mesh: Mesh | None) -> Any:
        if mesh is None:
            if isinstance(self.sharded, host_loops.SplitFunction):
                return self.sharded(*args, **kwargs)
            with tracing.at_stage(TraceStage.NOT_SPLIT):
                return self.sharded(*args, **kwargs)
        with (
            tracing.default_mesh(mesh),
            tracing.at_stage(TraceStage.ON_MESH, self._is_strict),
        ):
            return self.sharded(*args, **kwargs)

    def _run_replicated(
        self, function: Any, replication: Replication, args: Any, kwargs: Any
    ) -> Any:
        args, kwargs = replicated_arguments(args, kwargs)
        with (
            _mesh_only(self._mesh),
            tracing.at_stage(TraceStage.REPLICATED),
            replication.traced(self._mesh),
        ):
            return self._original(function, *args, **kwargs)

    def _run_replicated_first_time(
        self, args: Any, kwargs: Any, why: str, error: Any
    ) -> Any:
        unsupported = errors.error_of_function(
            self._name, str(error), why, self._is_strict
        )
        if self._is_strict:
            raise unsupported from errors.without_program(error)
        replication, function = Replication(), self._function._clone(None)
        replication.replicate_fully(why)
        try:
            outputs = self._run_replicated(function, replication, args, kwargs)
        except Exception:
            # The first error is raised instead of this error, because it
            # describes the layouts, which the user can change.
            raise unsupported from errors.without_program(error)
        self._replication, self._replicated = replication, function
        user_warnings.warn(
            f"DTensor cannot shard function {self._name!r}. Every device "
            f"computes {report.report_of_function(replication)}.",
            errors.LayoutMapWarning,
        )
        return outputs


@contextlib.contextmanager
def _mesh_only(mesh: Mesh) -> Iterator[None]:
    """Sets TensorFlow's default mesh, without an axis that shards batches."""
    with (
        dtensor.default_mesh(mesh),
        device_mesh.grappler_disabled(),
        ops.hide_info_logs(),
    ):
        yield
