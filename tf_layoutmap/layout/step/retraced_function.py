"""A function for a mesh, traced again where DTensor refuses to divide it.

First with more of its operations whole; where that does not do, with nothing
divided at all, but the weights where they are kept.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import error_messages, pinning
from tf_layoutmap.layout.step import computed_whole_report
from tf_layoutmap.layout.step.refused_operations import RefusedOperations
from tf_layoutmap.layout.variables.gathered_reads import GatheredReads

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
        self._function = self._made()
        self._mesh = context.mesh
        self._is_strict = getattr(context.layout_map, "strict", False)
        self._refused = RefusedOperations()
        # What a function reads that is computed whole.
        self._reads: GatheredReads | None = None
        self._finding = ""
        # Graphs in which a strict map found nothing to refuse.
        self._accepted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the function returns."""
        while True:
            if self._reads is not None:
                args, kwargs = whole_arguments(args, kwargs)
            traces = self._function.experimental_get_tracing_count()
            try:
                with self._more_of_it_whole():
                    if self._is_strict:
                        self._refuse_whole_operations(*args, **kwargs)
                    outputs = self._function(*args, **kwargs)
            except tf.errors.OpError as error:
                if self._is_strict or not self._may_try_again(
                    error, functools.partial(self.graph, *args, **kwargs)
                ):
                    raise
                self._function = self._made()
                continue
            if self._function.experimental_get_tracing_count() > traces:
                computed_whole_report.note(
                    self._computed_whole(self.graph(*args, **kwargs)),
                    self.model,
                    self.kind,
                )
            return outputs

    def _made(self) -> Any:
        function = self._make()
        setattr(function, _OF_A_STEP, True)
        return function

    @contextlib.contextmanager
    def _more_of_it_whole(self) -> Iterator[None]:
        with (
            self._refused.marks.applied(self._mesh),
            (
                contextlib.nullcontext()
                if self._reads is None
                else self._reads.applied()
            ),
        ):
            yield

    def _may_try_again(
        self, error: tf.errors.OpError, graph: Callable[[], Any]
    ) -> bool:
        """Whether the next trace has more of the function whole."""
        finding = error_messages.finding_of(str(error))
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

    def _computed_whole(self, graph: Any) -> tuple[Any, ...]:
        if self._reads is not None:
            return (computed_whole_report.all_of(self._reads, self._finding),)
        return (
            ()
            if graph is None
            else computed_whole_report.find(
                graph, self.model, self._refused.why
            )
        )

    def _refuse_whole_operations(self, *args: Any, **kwargs: Any) -> None:
        graph = self.graph(*args, **kwargs)
        if graph is None or graph in self._accepted:
            return
        found = self._computed_whole(graph)
        if found:
            raise error_messages.UnsupportedByDTensorError(
                computed_whole_report.sentence(found, self.model, self.kind)
                + " A LayoutMap with strict=False lets every device compute "
                "them whole."
            )
        self._accepted.add(graph)


def is_of_a_step(function: Any) -> bool:
    """Whether a `tf.function` is one of a `RetracedFunction`."""
    return hasattr(function, _OF_A_STEP)


def whole_arguments(args: Any, kwargs: Any) -> Any:
    """Returns arguments of a function, those on a mesh replicated."""
    return tf.nest.map_structure(
        lambda x: pinning.whole(x, None) if pinning.on_mesh(x) else x,
        (args, kwargs),
    )
