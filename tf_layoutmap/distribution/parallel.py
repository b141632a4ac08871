"""Distributions: `ModelParallel`, `DataParallel` and `set_distribution`.

These classes and this function have the same interface as in
`keras.distribution`. A distribution has a mesh and a batch axis, and
`ByLayoutMap` also has a layout map. A distribution has an effect inside its
`scope()`. After a call of `set_distribution`, a distribution also has an effect
outside of scopes, in the current thread.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import (
    Any,
    Literal,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
)

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import (
    checks,
    distribution_notice,
    keras_private,
    patches,
    user_warnings,
)
from tf_layoutmap.distribution.layout_map import (
    DeviceMesh,
    LayoutMap,
    TensorLayout,
)
from tf_layoutmap.layout.keras3 import context as mesh_context
from tf_layoutmap.layout.keras3.context import MeshContext
from tf_layoutmap.layout.keras_map import as_table
from tf_layoutmap.layout.layout_map import LayoutMap as AnyLayoutMap
from tf_layoutmap.layout.layout_table import LayoutTypeError
from tf_layoutmap.layout.mesh.device_mesh import (
    AnyMesh,
    Layout,
    axes_of_layout,
    axis_sizes,
    check_mesh,
    list_devices,
)
from tf_layoutmap.layout.scope import (
    prepared_context,
    weights_on_mesh,
)
from tf_layoutmap.mesh_scope import with_auto_layouts

_current = threading.local()

_Dataset = TypeVar("_Dataset")

KerasDistribution: TypeAlias = (
    keras.distribution.ModelParallel | keras.distribution.DataParallel
)
"""A distribution of Keras that has a counterpart in this package."""

AnyDistribution: TypeAlias = "Distribution | KerasDistribution"
"""A distribution of this package or of Keras."""


class _MeshAndPlanOptions(TypedDict, total=False):
    """Arguments of `ModelParallel` that only `layout_map="auto"` uses."""

    device_mesh: AnyMesh | None
    memory: int | str | None
    optimizer: Any
    batch_size: int | None
    pins: Mapping[str, str] | None


def distribution() -> AnyDistribution | None:
    """Returns the current distribution of this thread, or None.

    If user code passed a `tlm.distribution` object to
    `keras.distribution.set_distribution`, this object is returned. If user code
    passed a distribution of Keras to that function, the distribution is
    returned only after `tlm.distribution.enable()`, because otherwise it has no
    effect.
    """
    theirs = keras.distribution.distribution()
    return (
        recorded_distribution()
        if recorded_distribution() is not None
        or not hasattr(type(theirs), distribution_notice.EFFECTIVE)
        else theirs
    )


def recorded_distribution() -> Any:
    """Returns the distribution most recently set in this thread, or None."""
    return getattr(_current, "value", None)


def record_distribution(value: Any) -> None:
    """Stores `value` as the distribution of this thread."""
    _current.value = value


dtensor = tf.experimental.dtensor


def check_feeding(auto_shard_dataset: bool) -> None:
    """Checks the option `auto_shard_dataset` of a distribution.

    Raises:
      ValueError: If `auto_shard_dataset` is False with several processes.
    """
    if not auto_shard_dataset and dtensor.num_clients() > 1:
        raise ValueError(
            "Argument `auto_shard_dataset` must be True with several "
            "processes: each process gets full batches and uses its part. "
            "Received: auto_shard_dataset=False, with "
            f"{dtensor.num_clients()} processes. Pass a tf.data.Dataset of "
            "full batches in each process."
        )


class Distribution(keras_private.Distribution):
    """Base class of distributions, which have a mesh and a batch axis.

    The base class itself does not place variables on the mesh.

    ```python
    distribution = tlm.distribution.Distribution(device_mesh)
    with distribution.scope():
        assert tlm.distribution.distribution() is distribution
    ```
    """

    def __init__(
        self,
        device_mesh: AnyMesh,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
    ):
        """Creates the distribution.

        Args:
          device_mesh: `tlm.distribution.DeviceMesh`,
            `keras.distribution.DeviceMesh` or `dtensor.Mesh`.
          batch_dim_name: Mesh axis along which batches are sharded.
          auto_shard_dataset: Must be True if there are several processes. Each
            process gets full batches and uses only its shard of each batch.

        Raises:
          TypeError: If `device_mesh` is not a mesh.
          ValueError: If `auto_shard_dataset` is False with several processes.
        """
        check_mesh("device_mesh", device_mesh)
        check_feeding(auto_shard_dataset)
        keras_private.Distribution.__init__(
            self, device_mesh, batch_dim_name, bool(auto_shard_dataset)
        )
        self._num_processes = dtensor.num_clients()
        self._process_id = dtensor.client_id()
        self._is_multi_process = self._num_processes > 1

    @property
    def device_mesh(self) -> AnyMesh:
        """The mesh, as passed to the constructor."""
        return self._device_mesh

    @property
    def batch_dim_name(self) -> str | None:
        """The mesh axis along which batches are sharded."""
        return self._batch_dim_name

    @property
    def auto_shard_dataset(self) -> bool:
        """Value of the argument `auto_shard_dataset` of the constructor."""
        return self._auto_shard_dataset

    @auto_shard_dataset.setter
    def auto_shard_dataset(self, value: bool) -> None:
        check_feeding(value)
        self._auto_shard_dataset = bool(value)

    @property
    def num_processes(self) -> int:
        """Number of processes of this program."""
        return self._num_processes

    @property
    def num_model_replicas(self) -> int:
        """Number of shards of a batch."""
        raise NotImplementedError

    def get_data_layout(
        self, data_shape: Sequence[int]
    ) -> keras.distribution.TensorLayout:
        """Returns the layout of a batch of this shape."""
        raise NotImplementedError

    def get_variable_layout(
        self, variable: keras.Variable
    ) -> keras.distribution.TensorLayout:
        """Returns the current or future layout of a variable."""
        raise NotImplementedError

    def get_tensor_layout(
        self, path: str
    ) -> keras.distribution.TensorLayout | None:
        """Returns the layout that the layout map has for a name, or None."""
        raise NotImplementedError

    def distribute_dataset(self, dataset: _Dataset) -> _Dataset:
        """Returns `dataset` unchanged, because each step shards its batch."""
        return dataset

    def _model_context(self) -> MeshContext | None:
        """Returns the context of new models, for `set_distribution`.

        Raises:
          TypeError: If the class is a user-defined subclass that overrides
            `get_variable_layout`.
        """
        if type(self).get_variable_layout is not (
            Distribution.get_variable_layout
        ):
            raise TypeError(
                "A Distribution that overrides `get_variable_layout` must be "
                "a ModelParallel: layouts are read from its layout map. "
                f"Received: {type(self).__name__}."
            )

    def _place_new_models(self) -> contextlib.AbstractContextManager:
        """Returns a scope that places new models on the mesh."""
        self._model_context()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def scope(
        self,
    ) -> Iterator[AnyLayoutMap | keras.distribution.LayoutMap | None]:
        """Returns a context manager; models must be created inside it."""
        before = recorded_distribution()
        with self._place_new_models() as layout_map:
            record_distribution(self)
            try:
                yield layout_map
            finally:
                record_distribution(before)


class ByLayoutMap(Distribution):
    """Base class of distributions that use a layout map to place weights.

    Batches are sharded along one mesh axis.
    """

    def __init__(
        self,
        layout_map: AnyLayoutMap | keras.distribution.LayoutMap,
        batch_dim_name: str | None,
        auto_shard_dataset: bool,
    ):
        self._layout_map = layout_map
        self._table = as_table(layout_map)
        mesh = getattr(layout_map, "device_mesh", None)
        mesh = self._table.mesh_in_use() if mesh is None else mesh
        names = list(axis_sizes(mesh))
        super().__init__(
            mesh,
            names[0]
            if batch_dim_name is None
            else (checks.check_one_of("batch_dim_name", batch_dim_name, names)),
            auto_shard_dataset,
        )
        # If user code passes this object to
        # `keras.distribution.set_distribution`, this package is not notified.
        # Therefore, the patches are installed now.
        patches.ensure("keras3")

    @property
    def layout_map(self) -> AnyLayoutMap | keras.distribution.LayoutMap:
        """The layout map, as passed to the constructor."""
        return self._layout_map

    @property
    def num_model_replicas(self) -> int:
        """Number of shards of a batch."""
        return axis_sizes(self.device_mesh)[self._batch_dim_name]

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Returns the layout of a batch of this shape."""
        return self._layout(
            (self._batch_dim_name, *[None] * (len(data_shape) - 1))
        )

    def get_variable_layout(
        self, variable: keras.Variable
    ) -> keras.distribution.TensorLayout:
        """Returns the current or future layout of a variable."""
        layout = keras_private.given_layout(variable)
        if layout is None:
            layout = getattr(variable, "layout", None)
        if isinstance(layout, keras.distribution.TensorLayout):
            return layout
        if isinstance(layout, Layout):
            return self._layout(axes_of_layout(layout))
        tensor_layout = self.get_tensor_layout(variable.path)
        return (
            self._layout((None,) * len(variable.shape))
            if (tensor_layout is None)
            else tensor_layout
        )

    def get_tensor_layout(
        self, path: str
    ) -> keras.distribution.TensorLayout | None:
        """Returns the layout that the layout map has for a name, or None."""
        layout = self._layout_map[path]
        return (
            self._layout(axes_of_layout(layout))
            if isinstance(layout, Layout)
            else layout
        )

    def _layout(self, axes: tuple[str | None, ...]) -> TensorLayout:
        return TensorLayout(axes, self.device_mesh)

    def _model_context(self) -> MeshContext:
        """Returns the context of new models, for `set_distribution`."""
        return prepared_context(self._table, self._batch_dim_name)

    @functools.cached_property
    def _context_if_set_in_keras(self) -> Any:
        """The context that is used if Keras' `set_distribution` sets `self`."""
        return self._model_context()

    def _place_new_models(self) -> contextlib.AbstractContextManager:
        """Returns a scope that places new models on the mesh."""
        return weights_on_mesh(self._layout_map, self._batch_dim_name)


class ModelParallel(ByLayoutMap, keras.distribution.ModelParallel):
    """A distribution that shards weights as a layout map specifies.

    Batches are sharded along one mesh axis. This class replaces
    `keras.distribution.ModelParallel`, which has no effect with the TensorFlow
    backend. Models must be created in the scope of the distribution.

    ```python
    layout_map = tlm.distribution.LayoutMap(device_mesh)
    layout_map["dense.*kernel"] = (None, "model")
    distribution = tlm.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch")
    with distribution.scope():
        model = make_model()
    model.compile("adam", "mse")
    model.fit(x, y)
    ```
    """

    def __init__(
        self,
        layout_map: (
            AnyLayoutMap | keras.distribution.LayoutMap | Literal["auto"] | None
        ) = None,
        *,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
        **kwargs: Unpack[_MeshAndPlanOptions],
    ):
        """Creates the distribution.

        Args:
          layout_map: `tlm.distribution.LayoutMap`, `tlm.LayoutMap`, or
            `keras.distribution.LayoutMap`. As in Keras, a key of a Keras map
            must match the full path of a variable. `"auto"` plans the layouts
            when the scope ends, as in `tlm.layout_map_scope`.
          batch_dim_name: Mesh axis along which batches are sharded; None for
            the first axis, as in Keras.
          auto_shard_dataset: Must be True if there are several processes. Each
            process gets full batches and uses only its shard of each batch.
          **kwargs: `device_mesh`, which is required for `"auto"`. With a layout
            map it is accepted for compatibility and ignored, and the mesh of
            the map is used. For `"auto"`, also the arguments `memory`,
            `optimizer`, `batch_size` and `pins` of `tlm.plan`.

        Raises:
          TypeError: If `layout_map` is not a LayoutMap. The error is also a
            ValueError, which Keras raises.
          ValueError: If `layout_map` is None or has no mesh, `batch_dim_name`
            is not an axis of the mesh, or `auto_shard_dataset` is False with
            several processes.
        """
        device_mesh = kwargs.pop("device_mesh", None)
        if isinstance(layout_map, str) and layout_map == "auto":
            names = list(axis_sizes(check_mesh("device_mesh", device_mesh)))
            layout_map = with_auto_layouts(
                layout_map,
                names[0] if batch_dim_name is None else batch_dim_name,
                mesh=device_mesh,
                **cast(Any, kwargs),
            )
        elif kwargs:
            raise TypeError(
                "Arguments of ModelParallel must be `layout_map`, "
                "`batch_dim_name` or `auto_shard_dataset`. Received: "
                f"{sorted(kwargs)}."
            )
        if layout_map is None:
            raise ValueError("You must specify a layout_map argument.")
        if not isinstance(
            layout_map, (AnyLayoutMap, keras.distribution.LayoutMap)
        ):
            raise LayoutTypeError(
                "Argument `layout_map` must be a `LayoutMap` instance. "
                f"Received: layout_map={layout_map!r}"
            )
        super().__init__(layout_map, batch_dim_name, auto_shard_dataset)


class DataParallel(ByLayoutMap, keras.distribution.DataParallel):
    """A distribution that replicates weights and shards batches.

    This class replaces `keras.distribution.DataParallel`.

    ```python
    with tlm.distribution.DataParallel().scope():
        model = make_model()
    ```
    """

    def __init__(
        self,
        device_mesh: AnyMesh | None = None,
        devices: list[str] | None = None,
        auto_shard_dataset: bool = True,
    ):
        """Creates the distribution.

        Args:
          device_mesh: `tlm.distribution.DeviceMesh`,
            `keras.distribution.DeviceMesh` or `dtensor.Mesh`. Batches are
            sharded along its first axis. If `device_mesh` is None, a mesh is
            created from `devices`.
          devices: Device names for a mesh with one axis. None selects all
            devices of `list_devices()`.
          auto_shard_dataset: As in `ModelParallel`.

        Raises:
          TypeError: If `device_mesh` is not a mesh. The error is also a
            ValueError, which Keras raises.
          ValueError: If both `device_mesh` and `devices` are passed.
        """
        if device_mesh is not None and devices is not None:
            raise ValueError(
                "Only one of `device_mesh` and `devices` must be passed. "
                f"Received: device_mesh={device_mesh!r}, devices={devices!r}."
            )
        if device_mesh is None:
            row = np.ravel(list_devices() if devices is None else devices)
            device_mesh = DeviceMesh((row.size,), ["batch"], row)
        try:
            check_mesh("device_mesh", device_mesh)
        except TypeError as error:
            raise LayoutTypeError(
                "Expect `mesh` to be an instance of `DeviceMesh`. Received: "
                f"mesh={device_mesh!r} (of type {type(device_mesh)})"
            ) from error
        if (ndim := len(axis_sizes(device_mesh))) != 1:
            user_warnings.warn(
                "Expect the input mesh to be 1D, but received mesh.devices."
                f"ndim={ndim}. The first axis will be used for data-parallel "
                "sharding."
            )
        super().__init__(LayoutMap(device_mesh), None, auto_shard_dataset)


def set_distribution(value: AnyDistribution | None) -> None:
    """Sets the distribution for objects that this thread creates later.

    If an object is created inside a `scope()` or `tlm.layout_map_scope`, that
    scope takes precedence. Weights are initialized at their first use. If a
    layout does not fit its weight, the first use of the weight raises an error.
    `layout_map.explain(model)` reports such a layout earlier.

    ```python
    tlm.distribution.set_distribution(tlm.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"))
    model = make_model()
    model.compile("adam", "mse")
    model.fit(x, y)
    tlm.distribution.set_distribution(None)
    ```

    Args:
      value: `ModelParallel` or `DataParallel` of `tlm.distribution` or
        `keras.distribution`. After this call, `distribution()` returns this
        object. None removes the distribution.

    Raises:
      TypeError: If `value` has another type.
      RuntimeError: If DTensor's unsafe all-reduce pass is enabled in this
        process.
    """
    mesh_context.set_standing_context(
        None if value is None else _to_own_distribution(value)._model_context()
    )
    record_distribution(value)


def _to_own_distribution(value: Any) -> Distribution:
    """Converts a distribution of Keras to a distribution of this package."""
    if isinstance(value, Distribution):
        return value
    if _selects_layouts_as_keras(value):
        return _counterpart(value)
    return checks.check_type(
        "value", value, Distribution, "a ModelParallel, a DataParallel or None"
    )


def _selects_layouts_as_keras(value: Any) -> bool:
    """Returns whether `value` is a Keras distribution with Keras' layouts.

    A user-defined subclass may select layouts by other rules.
    """
    return any(
        isinstance(value, kind)
        and type(value).get_variable_layout is kind.get_variable_layout
        for kind in (
            keras.distribution.ModelParallel,
            keras.distribution.DataParallel,
        )
    )


def _counterpart(value: Any) -> ByLayoutMap:
    if isinstance(value, keras.distribution.ModelParallel):
        return ModelParallel(
            layout_map=keras_private.layout_map_of(value),
            batch_dim_name=value.batch_dim_name,
            auto_shard_dataset=value.auto_shard_dataset,
        )
    # `DataParallel` would repeat Keras' warning about a mesh with two axes.
    return ByLayoutMap(
        LayoutMap(value.device_mesh),
        value.batch_dim_name,
        value.auto_shard_dataset,
    )


def context_of_keras_distribution(value: Any) -> Any:
    """Returns the context of new models under a distribution of Keras.

    As on JAX, a user-defined subclass can override `get_variable_layout`.

    Raises:
      NotImplementedError: If `value` is a Keras `Distribution` without layouts.
    """
    if _selects_layouts_as_keras(value):
        return _counterpart(value)._model_context()
    kind = keras_private.Distribution
    if type(value).get_variable_layout is kind.get_variable_layout:
        value.get_variable_layout(None)  # Raises NotImplementedError.
    context = ByLayoutMap(
        LayoutMap(value.device_mesh),
        value.batch_dim_name,
        value.auto_shard_dataset,
    )._model_context()
    context.layout_of = functools.partial(_layout_by, value)
    return context


def _layout_by(distribution: Any, variable: Any) -> Any:
    """Returns the layout that a user-defined distribution selects.

    The method gets a copy of the variable's attributes, because the layout of
    the variable itself is not known yet.
    """
    return distribution.get_variable_layout(
        types.SimpleNamespace(
            path=variable.path,
            name=variable.name,
            shape=tuple(variable.shape),
            ndim=len(variable.shape),
            dtype=variable.dtype,
            trainable=variable.trainable,
            _layout=None,
        )
    )
