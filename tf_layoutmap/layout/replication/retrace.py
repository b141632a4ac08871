"""A function for a mesh, traced again where DTensor refuses to divide it.

First with more of its operations whole; where that does not do, with nothing
divided at all, but the weights where they are kept.
"""

# DOC-MERGE: A step that DTensor refuses to divide is traced again, with more of it whole.
#
# TensorFlow says at which operation it stopped; that one gets whole samples, and
# if that is refused as well, whole inputs and results.
#
import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import errors, pinning
from tf_layoutmap.layout.replication import replicated_ops, report
from tf_layoutmap.layout.replication.gathered_reads import GatheredReads
from tf_layoutmap.layout.replication.replicated_ops import (
    Extent,
    ReplicationMarks,
)

_NAME = re.compile(replicated_ops.NAME_ATTRIBUTE + r' = "([^"]+)"')
_SHAPES = re.compile(r"_global_shape = \[([^\]]*)\]")


class UnshardableOps:
    """What DTensor refused of one function of a model, and why."""

    def __init__(self):
        self.marks = ReplicationMarks()
        self._why: dict[str, str] = {}

    def mark(self, error: tf.errors.OpError, graph: Callable[[], Any]) -> bool:
        """Marks the operation that `error` stopped at.

        Args:
          error: Of the first call of a function on a mesh.
          graph: Gives its graph, or None.

        Returns:
          Whether the function should be traced again.
        """
        finding = errors.finding_of(str(error))
        if finding is None:
            return False
        operation = errors.stopped_at(str(error))
        graph = graph()
        if operation is None or graph is None:
            return False
        name = self._name(str(error), operation, graph)
        is_first, self.marks.is_named = not self.marks.is_named, True
        if name is None and is_first:
            # The next error names it.
            return True
        names = [
            op.name for op in graph.get_operations() if op.type == operation
        ]
        if name is not None:
            names = replicated_ops.same_scope_ops(name, names) or [name]
        # Otherwise DTensor stopped at an operation that it created itself,
        # which has the type of the original and no name: all of that type.
        extents = self.marks.extents
        extent = (
            Extent.ALL
            if any(one in extents for one in names)
            else Extent.SAMPLES
        )
        if all(extents.get(one) == extent for one in names):
            return False
        for alike in names:
            extents[alike] = extent
            self._why[alike] = finding
        return True

    def _name(self, error: str, operation: str, graph: Any) -> str | None:
        named = _NAME.search(error)
        if named is not None:
            return named.group(1)
        shapes = _SHAPES.search(error)
        if shapes is None:
            return None
        fitting = [
            op.name
            for op in graph.get_operations()
            if op.type == operation and _shapes(op) == shapes.group(1)
        ]
        if not fitting or len(
            replicated_ops.same_scope_ops(fitting[0], fitting)
        ) < len(fitting):
            return None
        return fitting[0]

    def why(self, name: str) -> str | None:
        """Returns what DTensor said of operation `name`; None if nothing."""
        return self._why.get(name)


def _shapes(op: Any) -> str:
    """Returns the shapes of results as the compiler writes them."""
    return ", ".join(
        "#tf_type.shape<"
        + "x".join("?" if size is None else str(size) for size in x.shape)
        + ">"
        if x.shape.rank is not None
        else "#tf_type.shape<*>"
        for x in op.outputs
    )


# The attribute of functions that are traced again here.
_OF_A_STEP = "_layoutmap_of_a_step"


class RetracedFunction:
    """A `tf.function` of a model on a mesh.

    DTensor refuses while it compiles, before anything is computed. Then the
    function is traced anew with more of it whole, and that is told.
    """

    def __init__(
        self, make: Callable[[], Any], model: Any, kind: str, context: Any
    ):
        """Makes the function; nothing is traced before it is called.

        Args:
          make: Returns a new `tf.function`.
          model: Whose layers are named.
          kind: What the function does, as `"train"`.
          context: `MeshContext` of the model. Its layout map says whether what
            DTensor cannot divide is refused.
        """
        self.model = model
        self.kind = kind
        self._make = make
        self._function = self._new_function()
        self._mesh = context.mesh
        self._is_strict = getattr(context.layout_map, "strict", False)
        self._refused = UnshardableOps()
        # What a function reads that is computed whole.
        self._reads: GatheredReads | None = None
        self._finding = ""
        # Graphs in which a strict map found nothing to refuse.
        self._accepted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the function returns."""
        while True:
            if self._reads is not None:
                args, kwargs = replicated_arguments(args, kwargs)
            traces = self._function.experimental_get_tracing_count()
            try:
                with self._marks_applied():
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
            if self._function.experimental_get_tracing_count() > traces:
                report.record(
                    self._replicated_ops(self.graph(*args, **kwargs)),
                    self.model,
                    self.kind,
                )
            return outputs

    def _new_function(self) -> Any:
        function = self._make()
        setattr(function, _OF_A_STEP, True)
        return function

    @contextlib.contextmanager
    def _marks_applied(self) -> Iterator[None]:
        with (
            self._refused.marks.applied(self._mesh),
            (
                contextlib.nullcontext()
                if self._reads is None
                else self._reads.applied()
            ),
        ):
            yield

    def _should_retrace(
        self, error: tf.errors.OpError, graph: Callable[[], Any]
    ) -> bool:
        """Whether the next trace has more of the function whole."""
        finding = errors.finding_of(str(error))
        if finding is None or self._reads is not None:
            return False
        if not self._refused.mark(error, graph):
            self._reads, self._finding = GatheredReads(), finding
            self._refused.marks.extents.clear()
        return True

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the graph that runs for such arguments; None without one."""
        try:
            return self._function.get_concrete_function(*args, **kwargs).graph
        except Exception:  # The trace itself failed; its error is raised.
            return None

    def _replicated_ops(self, graph: Any) -> tuple[Any, ...]:
        if self._reads is not None:
            return (report.report_of_function(self._reads, self._finding),)
        return (
            ()
            if graph is None
            else report.replicated_ops_of_graph(
                graph, self.model, self._refused.why
            )
        )

    def _raise_if_replicated(self, *args: Any, **kwargs: Any) -> None:
        graph = self.graph(*args, **kwargs)
        if graph is None or graph in self._accepted:
            return
        found = self._replicated_ops(graph)
        if found:
            raise errors.UnsupportedByDTensorError(
                report.message(found, self.model, self.kind)
                + " A LayoutMap with strict=False lets every device compute "
                "them whole."
            )
        self._accepted.add(graph)


def is_step_function(function: Any) -> bool:
    """Whether a `tf.function` is one of a `RetracedFunction`."""
    return hasattr(function, _OF_A_STEP)


def replicated_arguments(args: Any, kwargs: Any) -> Any:
    """Returns arguments of a function, those on a mesh replicated."""
    return tf.nest.map_structure(
        lambda x: pinning.replicated(x, None) if pinning.on_mesh(x) else x,
        (args, kwargs),
    )
