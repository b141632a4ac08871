"""A function for a mesh, traced again where DTensor refuses to divide it."""

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import error_messages
from tf_layoutmap.layout.step import computed_whole_report
from tf_layoutmap.layout.step.refused_operations import RefusedOperations


class RetracedFunction:
    """A `tf.function` of a model on a mesh.

    DTensor refuses while it compiles, before anything is computed. Then the
    function is traced anew with more of it whole, and that is told.
    """

    def __init__(self, make: Callable[[], Any], model: Any, kind: str,
                 context: Any):
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
        self._function = make()
        self._mesh = context.mesh
        self._is_strict = getattr(context.layout_map, "strict", False)
        self._refused = RefusedOperations()
        # Graphs in which a strict map found nothing to refuse.
        self._accepted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the function returns."""
        while True:
            traces = self._function.experimental_get_tracing_count()
            try:
                with self._refused.marks.applied(self._mesh):
                    if self._is_strict:
                        self._refuse_whole_operations(*args, **kwargs)
                    outputs = self._function(*args, **kwargs)
            except tf.errors.OpError as error:
                if self._is_strict or not self._refused.mark(
                        error, lambda: self.graph(*args, **kwargs)):
                    raise
                self._function = self._make()
                continue
            if self._function.experimental_get_tracing_count() > traces:
                computed_whole_report.note(
                    self._computed_whole(self.graph(*args, **kwargs)),
                    self.model, self.kind)
            return outputs

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the graph that runs for such arguments; None without one."""
        try:
            return self._function.get_concrete_function(*args, **kwargs).graph
        except Exception:  # The trace itself failed; its error is raised.
            return None

    def _computed_whole(self, graph: Any) -> tuple[Any, ...]:
        return () if graph is None else computed_whole_report.find(
            graph, self.model, self._refused.why)

    def _refuse_whole_operations(self, *args: Any, **kwargs: Any) -> None:
        graph = self.graph(*args, **kwargs)
        if graph is None or graph in self._accepted:
            return
        found = self._computed_whole(graph)
        if found:
            raise error_messages.UnsupportedByDTensorError(
                computed_whole_report.sentence(found, self.model, self.kind) +
                " A LayoutMap with strict=False lets every device compute them "
                "whole.")
        self._accepted.add(graph)
