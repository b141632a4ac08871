"""What tf_keras models and this thread know of their layout map."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tf_layoutmap import _tf_keras_private
from tf_layoutmap.layout.mesh.layouts import Mesh

# Of this thread: `building`, `calling` (see `flag`) and `mesh`, that of the
# step that runs.
state = threading.local()


class TfKerasMap:
    """What tf_keras holds as its layout map: the context of a model."""

    def __init__(self, context: Any):
        self.context = context

    def get_default_mesh(self) -> Mesh:
        """Returns the mesh for counters, losses and metrics."""
        return self.context.mesh

    def __deepcopy__(self, memo: dict) -> "TfKerasMap":
        return self


def context_of(model: Any) -> Any:
    """Returns the context of a tf_keras model, or None."""
    layout_map = getattr(model, "_layout_map", None)
    return layout_map.context if isinstance(layout_map, TfKerasMap) else None


def is_building() -> bool:
    """Whether this thread traces a model only to make its weights."""
    return getattr(state, "building", False)


@contextlib.contextmanager
def flag(name: str) -> Iterator[None]:
    """While open, `name` is True in `state`."""
    before = getattr(state, name, False)
    setattr(state, name, True)
    try:
        yield
    finally:
        setattr(state, name, before)


@contextlib.contextmanager
def using(layout_map: Any) -> Iterator[None]:
    """While open, `layout_map` is what tf_keras makes models under."""
    before = _tf_keras_private.layout_map_in_use()
    _tf_keras_private.use_layout_map(layout_map)
    try:
        yield
    finally:
        _tf_keras_private.use_layout_map(before)
