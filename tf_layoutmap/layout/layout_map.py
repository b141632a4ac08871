"""`LayoutMap`: a dict-like mapping from variable names to layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from tf_layoutmap.layout.layout_table import LayoutTable

if TYPE_CHECKING:
    from tf_layoutmap._core.types import KerasLayer
    from tf_layoutmap.layout.explain import Explanation


class LayoutMap(LayoutTable):
    """Maps the names of variables to `tf.experimental.dtensor.Layout`s.

    A stored key is a plain name or a regular expression. If a key is equal to a
    name, a lookup of the name returns the layout of this key. Otherwise, the
    lookup returns the layout of the first key, in insertion order, that matches
    from the start of the name. If no key matches, the lookup returns None.

    ```python
    layout_map = tlm.LayoutMap(mesh=mesh)
    layout_map[".*dense.*kernel"] = layout_2d
    layout_map[".*dense.*bias"] = layout_1d

    layout_map["dense_1.kernel"]            # layout_2d
    layout_map["my_model/dense_7/bias"]     # layout_1d
    layout_map["conv.kernel"]               # None
    ```

    `in`, `len`, iteration, `pop` and `del` use the stored keys and do not
    match patterns. A key can be set only once; `del` it before you set it
    again.
    """

    @contextlib.contextmanager
    def scope(self, *, batch_dim: str | None = None) -> Iterator[Self]:
        """Returns the context manager `tlm.layout_map_scope` for this map.

        Arguments are the same as for `tlm.layout_map_scope`.
        """
        # The import is inside the method because the module imports Keras.
        from tf_layoutmap.layout import scope

        with scope.weights_on_mesh(self, batch_dim):
            yield self

    def explain(self, model: KerasLayer) -> Explanation:
        """Returns a report of the layouts that this map gives to `model`.

        Nothing is allocated. When the report is printed, it is shown as a
        table.

        Args:
          model: A Keras model or layer, created with or without the scope.

        Returns:
          An `Explanation`. For each variable, the report lists the key that
          matches, the keys that this key shadows, the layout and the bytes per
          device. The report also lists the keys that match no variable.

        Raises:
          TypeError: If `model` is not a layer.
          ValueError: If the map has no mesh.
        """
        from tf_layoutmap.layout.explain import explain

        return explain(self, model)
