"""Table of layouts by variable name: `LayoutMap` without Keras."""

from __future__ import annotations

import collections.abc
from typing import Any, TypeVar, cast, overload

import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layout import key_matching
from tf_layoutmap.layout.mesh import device_mesh
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh, prepare_process

dtensor = tf.experimental.dtensor

_Default = TypeVar("_Default")


class LayoutTypeError(TypeError, ValueError):
    """Error for a value that is not a layout.

    The class is a `TypeError`, and also a `ValueError`, because tf.keras raised
    a `ValueError` in this case.
    """


class LayoutTable(collections.abc.MutableMapping[str, Any]):
    """A mapping from keys to layouts, which can be looked up by variable name.

    This is the base class of `tlm.LayoutMap`, and does not import Keras.
    `scope` and `explain` are defined in the subclass, because the modules that
    implement these methods import this module.
    """

    # Whether to raise an error if two keys match the same name, even if the map
    # is not strict.
    _refuses_two = False

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        match: str = "match",
        strict: bool = False,
    ):
        """Initializes an empty map.

        Args:
          mesh: `dtensor.Mesh` on which variables without a layout are
            replicated. None uses the mesh of the layouts.
          match: Where a regular expression must match: `"match"` at the start
            of the name, `"search"` anywhere in the name, or `"fullmatch"` the
            full name.
          strict: Whether to raise an error if two keys match a name and neither
            key is equal to the name, if a key matches no variable, or if
            DTensor cannot shard an operation or a weight. By default, the first
            key is used, unused keys are reported in a warning, and the
            operation is replicated or the weight is gathered.

        Raises:
          TypeError: If `mesh` is not a `dtensor.Mesh`.
        """
        if mesh is not None:
            checks.check_type(
                "mesh",
                mesh,
                dtensor.Mesh,
                "a tf.experimental.dtensor.Mesh or None; "
                "tlm.distribution.LayoutMap accepts a DeviceMesh",
            )
        prepare_process(mesh)
        self._default_mesh = mesh
        # Each value is a result of `_check_layout`.
        self._layouts: dict[str, Any] = {}
        self._patterns = key_matching.PatternTable(mode=match)
        self._strict = bool(strict)

    @property
    def strict(self) -> bool:
        """Value of the argument `strict` of the constructor."""
        return self._strict

    def find(
        self,
        keys: collections.abc.Sequence[str],
        *,
        reserved_names: collections.abc.Container[str] = (),
    ) -> key_matching.Match | None:
        """Returns the stored key that matches a variable with these names.

        Args:
          keys: All names of one variable, the preferred name first.
          reserved_names: Names of other variables. A stored key that is equal
            to one of these names matches only variables that have this name.

        Returns:
          The stored key that matches, the name that it matches, and the
          shadowed keys, which also match but do not have precedence. None if no
          key matches.
        """
        return self._patterns.find(keys, reserved_names=reserved_names)

    def __getitem__(self, key: str) -> Layout | None:
        """Returns the layout for the name `key`.

        Args:
          key: The name of a variable.

        Returns:
          If a key is equal to the name, the layout of this key. Otherwise, the
          layout of the first key that matches, or None if no key matches.

        Raises:
          TypeError: If `key` is not a string.
          ValueError: If two keys match, and the map is strict or a
            `tlm.distribution.LayoutMap`.
        """
        checks.check_type("key", key, str, "a string")
        if key in self._layouts:
            return self._layouts[key]
        match = self._patterns.find([key])
        if match is None:
            return None
        self._check_match(match)
        return self._layouts[match.pattern]

    def _check_match(self, match: key_matching.Match) -> None:
        """Raises a `ValueError` if this map does not allow several matches."""
        if self._strict:
            key_matching.check_single_match(match)
        elif self._refuses_two:
            key_matching.check_single_match_as_keras(match)

    def _names_to_match(
        self, path: str, names: collections.abc.Sequence[str]
    ) -> collections.abc.Sequence[str]:
        """Returns the names that are used to look up a variable.

        Args:
          path: Path of the variable in Keras.
          names: All names of the variable, including `path`.
        """
        del path
        return names

    def _is_layer_output(self, key: str) -> bool:
        """Returns whether a stored key selects outputs of layers."""
        del key
        return False

    def __setitem__(
        self, key: str, layout: Layout | collections.abc.Sequence[str | None]
    ) -> None:
        """Stores `layout` under the name or pattern `key`.

        Args:
          key: The name of a variable, or a regular expression.
          layout: A `dtensor.Layout`. In a map with a mesh, the value can also
            be a tuple with the mesh axis of each dimension, or None for an
            unsharded dimension.

        Raises:
          TypeError: If `key` is not a string or `layout` has an unsupported
            type (the latter error is also a `ValueError`).
          ValueError: If `key` exists already, or is not a valid regular
            expression.
        """
        if isinstance(key, str) and key in self._layouts:
            raise ValueError(
                f"{key} already exists in the LayoutMap with value "
                f"{self._layouts[key]}. Please make sure to not use "
                "duplicated keys, or delete it first to set it again."
            )
        layout = self._check_layout(key, layout)
        self._patterns.add(key)
        self._layouts[key] = layout

    def __delitem__(self, key: str) -> None:
        del self._layouts[key]
        self._patterns.remove(key)

    def __len__(self) -> int:
        return len(self._layouts)

    def __iter__(self) -> collections.abc.Iterator[str]:
        return iter(self._layouts)

    def __contains__(self, key: object) -> bool:
        return key in self._layouts

    def __repr__(self) -> str:
        inside = ", ".join(
            f"{key!r}: {self.axes_of(value)!r}"
            for key, value in self._layouts.items()
        )
        return f"{type(self).__name__}({{{inside}}})"

    # Two maps are equal only if they are the same object, even if their layouts
    # are equal.
    __eq__ = object.__eq__
    __hash__: Any = object.__hash__

    @overload
    def get(self, key: str, default: None = None) -> Layout | None: ...

    @overload
    def get(self, key: str, default: _Default) -> Layout | _Default: ...

    def get(self, key: str, default: object = None) -> object:
        """Returns `layout_map[key]`, or `default` if it is None."""
        layout = self[key]
        return default if layout is None else layout

    @overload
    def pop(self, key: str) -> Layout: ...

    @overload
    def pop(self, key: str, default: _Default, /) -> Layout | _Default: ...

    def pop(self, key: str, *default: object) -> object:
        """Removes the stored `key` and returns its layout.

        Raises:
          KeyError: If the key is not stored and no default is passed.
        """
        if key not in self._layouts and default:
            return default[0]
        layout = self._layouts[key]
        del self[key]
        return layout

    def setdefault(
        self,
        key: str,
        default: Layout | collections.abc.Sequence[str | None] | None = None,
    ) -> Layout:
        """Returns the layout of `key`; stores `default` if it is missing."""
        if key not in self._layouts:
            # If `default` is None, `_check_layout` raises an error.
            self[key] = cast(Layout, default)
        return self._layouts[key]

    def get_default_mesh(self) -> Mesh | None:
        """Returns the mesh that was passed to the constructor, or None."""
        return self._default_mesh

    def mesh_in_use(self) -> Mesh:
        """Returns the mesh on which this map places variables.

        The result is the default mesh, or the mesh of the layouts if the map
        has no default mesh.

        Raises:
          ValueError: If there is no mesh, or if the layouts use several meshes.
        """
        meshes = (
            {}
            if self._default_mesh is None
            else {self._default_mesh.to_string(): (self._default_mesh, "mesh")}
        )
        for key, value in self._layouts.items():
            mesh = self._mesh_of(value)
            if mesh is not None:
                meshes.setdefault(mesh.to_string(), (mesh, key))
        if not meshes:
            raise ValueError(
                "A LayoutMap needs a mesh to replicate variables on. "
                "Received: no mesh and no layouts. Create it with "
                "LayoutMap(mesh=mesh)."
            )
        if len(meshes) > 1:
            raise ValueError(
                "All layouts of a LayoutMap must use the same mesh. Received: "
                f"{len(meshes)} meshes, for "
                f"{', '.join(repr(key) for _, key in meshes.values())}."
            )
        return next(iter(meshes.values()))[0]

    def axes_of(self, value: Layout) -> tuple[str | None, ...]:
        """Returns the mesh axis of each dimension of a stored value."""
        return device_mesh.axes_of_layout(value)

    def _mesh_of(self, value: Any) -> Mesh | None:
        return value.mesh

    def _check_layout(self, key: Any, layout: Any) -> Any:
        """Converts a tuple of mesh axes to a layout."""
        if isinstance(layout, tuple | list):
            return self._layout_of_axes(key, layout)
        if not isinstance(layout, dtensor.Layout):
            raise LayoutTypeError(
                f"{layout!r} should be a dtensor.Layout, or a tuple of axis "
                f"names of the mesh, got {type(layout).__name__} "
                f"(key {key!r})."
            )
        prepare_process(layout.mesh)
        return layout

    def _layout_of_axes(
        self, key: Any, axes: collections.abc.Sequence[Any]
    ) -> Layout:
        mesh = self._default_mesh
        if mesh is None:
            raise LayoutTypeError(
                f"{axes!r} should be a dtensor.Layout in a LayoutMap without a "
                f"mesh (key {key!r}). Create the map with "
                "LayoutMap(mesh=mesh) to set tuples of axis names."
            )
        specs = [dtensor.UNSHARDED if axis is None else axis for axis in axes]
        for axis in specs:
            if axis != dtensor.UNSHARDED and axis not in mesh.dim_names:
                raise LayoutTypeError(
                    "Each element of a layout tuple must be one of the mesh "
                    f"axes {mesh.dim_names} or None. Received: {axis!r} in "
                    f"{axes!r} (key {key!r})."
                )
        try:
            return dtensor.Layout(specs, mesh)
        except ValueError as error:
            raise LayoutTypeError(
                f"{axes!r} is not a valid layout on mesh axes "
                f"{mesh.dim_names} (key {key!r}). {error}"
            ) from error
