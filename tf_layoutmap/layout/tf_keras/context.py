"""What tf_keras models and this thread know of their layout map."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tf_layoutmap import _tf_keras_private
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.mesh.thread_value import ThreadValue

# Whether a model is traced only to make its weights.
is_building = ThreadValue(False)
# Whether a model is called eagerly, with tensors on its mesh.
is_calling = ThreadValue(False)
# That of the step that runs.
mesh_of_step: ThreadValue[Mesh | None] = ThreadValue(None)


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


@contextlib.contextmanager
def using(layout_map: Any) -> Iterator[None]:
    """While open, `layout_map` is what tf_keras makes models under."""
    before = _tf_keras_private.layout_map_in_use()
    _tf_keras_private.use_layout_map(layout_map)
    try:
        yield
    finally:
        _tf_keras_private.use_layout_map(before)
