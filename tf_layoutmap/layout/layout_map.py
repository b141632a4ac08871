"""`LayoutMap`: a dict-like object from variable names to layouts."""

from typing import Any

from tf_layoutmap.layout.layout_table import LayoutTable


class LayoutMap(LayoutTable):
    """Maps the names of variables to `tf.experimental.dtensor.Layout`s.

    A stored key is a plain name or a regular expression. Asking for a name
    gives the layout of the equal key if there is one, else of the first key,
    in the order they were set, that matches from the start of the name, else
    None.

    ```python
    layout_map = tlm.LayoutMap(mesh=mesh)
    layout_map[".*dense.*kernel"] = layout_2d
    layout_map[".*dense.*bias"] = layout_1d

    layout_map["dense_1.kernel"]            # layout_2d
    layout_map["my_model/dense_7/bias"]     # layout_1d
    layout_map["conv.kernel"]               # None
    ```

    As a mapping it holds the stored keys: `in`, `len`, iteration, `pop` and
    `del` mean a key as it was set. A key is set once; `del` it to change it.
    """

    def scope(self, **options: Any) -> Any:
        """Returns `tlm.layout_map_scope(self, **options)`."""
        # Keras is imported when it is used.
        from tf_layoutmap.layout.layout_map_scope import layout_map_scope

        return layout_map_scope(self, **options)

    def explain(self, model: Any) -> Any:
        """Returns what this map does to `model`, and what is wrong with it.

        Nothing is allocated. `print` shows it as a table.

        Args:
          model: A Keras model or layer, made with or without the scope.

        Returns:
          An `Explanation`: per variable the key that matches, those it
          shadows, layout and bytes per device; keys without a variable.

        Raises:
          TypeError: `model` is no layer.
          ValueError: The map has no mesh.
        """
        from tf_layoutmap.layout.explain import explain

        return explain(self, model)
