"""Preprocessing layers of a model that run on the host before a step.

The devices of a mesh cannot exchange strings or hold lookup tables. Therefore,
the host computes some layers of a Functional or Sequential model for each
batch, if these layers directly follow the inputs of the model:

* layers that look up strings or integers, such as `StringLookup`,
  `TextVectorization` and `Hashing`;
* layers that were adapted before the model was created, such as the
  `Normalization` layer of a `FeatureSpace`;
* operations without variables from whose results the layers above, or layers
  whose tables are on the host, get their inputs, such as slices of an input.

The host also looks up the rows of layers whose tables are on the host, if their
ids are available on the host (`host_lookups`).

The results are copied to the mesh, where the rest of the model runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.layout.keras3 import host_lookups
from tf_layoutmap.layout.keras3.host_lookups import (
    HostLookup,
    RowsOnMesh,
    TablesOnHost,
)
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh.tracing import ThreadValue

# Attribute of a Functional model that holds its `HostLayers`, or None.
_SPLIT = "_layoutmap_host_layers"

# Layers that DTensor does not support for any input.
LOOKUPS = (
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    keras.layers.TextVectorization,
    keras.layers.Hashing,
    keras.layers.HashedCrossing,
)

# Layers whose weights are created by `adapt` and are not trainable.
_ADAPTED = (*LOOKUPS, keras.layers.Normalization, keras.layers.Discretization)

# The `HostLayers` of the model that this thread runs, the host results, and the
# lookups.
_active_split: ThreadValue[
    tuple[HostLayers | None, list[Any], list[HostLookup]]
] = ThreadValue((None, [], []))


class HostLayers:
    """The part of a Functional model that runs on the host.

    Attributes:
      functional: The model.
      layers: The layers that run on the host.
      on_mesh: The rest of the model.
    """

    def __init__(
        self,
        functional: Any,
        nodes: list[Any],
        results: list[Any],
        lookups: list[tuple[TablesOnHost, Any]],
    ):
        """Splits a model.

        Args:
          functional: The model.
          nodes: The calls of layers that the host runs.
          results: Symbolic tensors that the host passes to the mesh. The
            results include inputs of the model that the mesh uses directly.
          lookups: Tables on the host, and the call of their layer, for each
            lookup that the host runs. `results` contains the inputs.
        """
        self.functional = functional
        self.layers = [node.operation for node in nodes]
        self._on_host = keras.Function(functional.inputs, results)
        self.on_mesh = _PartOnMesh(functional, nodes, results)
        self._symbols = [id(x) for x in results]
        self._lookups = lookups

    def compute(
        self, inputs: Any, *, is_training: bool
    ) -> tuple[list[Any], list[HostLookup]]:
        """Returns the host results that the mesh uses for a batch.

        Args:
          inputs: Inputs of the model, as host values.
          is_training: Whether gradients of the rows will be computed.

        Returns:
          The results, followed by the list of rows of each lookup; and the
          lookups.
        """
        results: Any = self._on_host(
            self.functional._standardize_inputs(inputs)
        )
        results = list(results)
        values = dict(zip(self._symbols, results))
        lookups = host_lookups.run(
            [
                (tables, *_arguments(node, values))
                for tables, node in self._lookups
            ],
            is_training=is_training,
        )
        # The mesh does not use the values of strings, except which keys are
        # padding.
        results = [tf.not_equal(x, "") if _is_string(x) else x for x in results]
        return [*results, *(lookup.rows for lookup in lookups)], lookups

    def run_on_mesh(
        self,
        run: Callable[..., Any],
        results: list[Any],
        lookups: list[HostLookup],
    ) -> Any:
        """Runs the part of the model that is on the mesh.

        Args:
          run: Function that runs `on_mesh` for a list of tensors.
          results: Results of `compute`, copied to the mesh.
          lookups: Lookups of `compute`.
        """
        count = len(results) - len(lookups)
        # Each run attaches the rows to new tensors, because the rows of a
        # tensor are used once.
        tensors = [tf.identity(x) for x in results[:count]]
        values = dict(zip(self._symbols, tensors))
        for index, (lookup, (_, node)) in enumerate(
            zip(lookups, self._lookups)
        ):
            rows = RowsOnMesh(lookup, results[count + index], index)
            host_lookups.attach(values[id(node.input_tensors[0])], rows)
        return run(self.on_mesh, tensors)


class _PartOnMesh(keras.Function):
    """The part of a Functional model that runs on the mesh.

    Before Keras 3.14, `keras.Function(results, outputs)` also contains the
    operations that compute `results`. It raises an error, or runs them again.
    """

    def __init__(self, functional: Any, on_host: list[Any], results: list[Any]):
        """Creates the part.

        Args:
          functional: The model.
          on_host: The nodes of the model that the host runs.
          results: Symbolic tensors that the host passes to the mesh.
        """
        self._given = functional.inputs
        super().__init__(functional.inputs, functional._outputs_struct)
        self._given = results
        omitted = set(on_host)
        self._nodes_by_depth = {
            depth: [node for node in nodes if node not in omitted]
            for depth, nodes in functional._nodes_by_depth.items()
        }

    @property
    def inputs(self) -> list[Any]:
        """Symbolic tensors whose values are passed to a call."""
        return self._given


def use_host_results(
    split: HostLayers | None, results: list[Any], lookups: list[HostLookup]
) -> AbstractContextManager[None]:
    """Returns a context manager in which calls of a model use `results`.

    Args:
      split: Host layers of the model, or None if it has none.
      results: Results of `split.compute`, copied to the mesh.
      lookups: Lookups of `split.compute`.
    """
    return (
        nullcontext()
        if split is None
        else _active_split.set_to((split, results, lookups))
    )


def host_layers_of(model: Any) -> HostLayers | None:
    """Returns the layers of `model` that run on the host, or None."""
    functional = getattr(model, "_functional", model)
    if not isinstance(functional, keras_private.Functional) or (
        not _is_called_once(model)
    ):
        return None
    attributes = vars(functional)
    if _SPLIT not in attributes:
        # Keras would track the object as a layer if it were set with `setattr`.
        attributes[_SPLIT] = _split(functional)
    return attributes[_SPLIT]


def host_weights_of(model: Any) -> list[Any]:
    """Returns the weights of the layers of `model` that run on the host."""
    split = host_layers_of(model)
    return (
        []
        if split is None
        else [
            weight
            for layer in split.layers
            for weight in getattr(layer, "variables", ())
        ]
    )


def run_through_graph(
    original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs a Functional model; on a mesh, it uses the current host results."""
    split, results, lookups = _active_split.get()
    if split is None or split.functional is not model:
        return original(model, inputs, *args, **kwargs)
    return split.run_on_mesh(
        lambda on_mesh, tensors: original(on_mesh, tensors, *args, **kwargs),
        results,
        lookups,
    )


def _is_called_once(model: Any) -> bool:
    """Returns whether a step calls the model only with the inputs of the batch.

    The host results are valid only for these inputs. User code can override
    `train_step` or `call`, and call the model with other inputs.
    """
    return all(
        getattr(getattr(model, name), "__func__", None) is getattr(kind, name)
        for kind, names in (
            (
                keras.Sequential
                if isinstance(model, keras.Sequential)
                else keras_private.Functional,
                ("call",),
            ),
            (
                keras.Model,
                ("train_step", "test_step", "predict_step", "compute_loss"),
            ),
        )
        for name in names
    )


def _split(functional: Any) -> HostLayers | None:
    """Returns the host layers of a Functional model, or None."""
    input_ids = {id(x) for x in functional.inputs}
    on_host = {*input_ids}
    needed = _needed_on_host(functional)
    nodes: list[Any] = []
    lookups: list[tuple[TablesOnHost, Any]] = []
    used: dict[int, Any] = {}
    ids: dict[int, Any] = {}
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        for node in functional._nodes_by_depth[depth]:
            if node.is_input:
                continue
            layer, inputs = node.operation, node.input_tensors
            if _runs_on_host(node, on_host, on_host - input_ids, needed):
                nodes.append(node)
                on_host.update(map(id, node.outputs))
            elif (tables := host_lookups.tables_of(layer)) is not None and (
                all(id(x) in on_host for x in inputs)
            ):
                lookups.append((tables, node))
                ids.update((id(x), x) for x in inputs)
            else:
                used.update((id(x), x) for x in inputs if id(x) in on_host)
    used.update((id(x), x) for x in functional.outputs if id(x) in on_host)
    if not (nodes or lookups) or any(_is_string(x) for x in used.values()):
        return None
    return HostLayers(
        functional, nodes, list({**used, **ids}.values()), lookups
    )


def _arguments(node: Any, values: dict[int, Any]) -> tuple[Any, Any]:
    """Returns the inputs and the weights of a call of a layer.

    Args:
      node: Call of a layer whose tables are on the host.
      values: Values of symbolic tensors, by the id of the tensor.
    """
    args, kwargs = node.arguments.fill_in(values)
    call = inspect.signature(node.operation.call).bind(*args, **kwargs)
    return call.args[0], call.arguments.get("weights")


def _needed_on_host(functional: Any) -> set[int]:
    """Returns the `id` of each tensor that lookups on the host need.

    These tensors are the inputs of layers that DTensor does not support and of
    layers whose tables are on the host, and the tensors from which operations
    without variables compute such inputs, for example slices of an input.
    """
    needed: set[int] = set()
    for depth in sorted(functional._nodes_by_depth):
        for node in functional._nodes_by_depth[depth]:
            operation = node.operation
            if (
                isinstance(operation, LOOKUPS)
                or host_lookups.tables_of(operation) is not None
                or (
                    not isinstance(operation, keras.Model)
                    and not getattr(operation, "variables", ())
                    and any(id(x) in needed for x in node.outputs)
                )
            ):
                needed.update(map(id, node.input_tensors))
    return needed


def _runs_on_host(
    node: Any, on_host: set[int], computed: set[int], needed: set[int]
) -> bool:
    """Returns whether the host computes a node of a model.

    Args:
      node: Call of a layer or an operation.
      on_host: Ids of the symbolic tensors that are available on the host.
      computed: Ids of the tensors in `on_host` that are not model inputs.
      needed: Result of `_needed_on_host`.
    """
    layer, inputs = node.operation, node.input_tensors
    weights = getattr(layer, "weights", [])
    if (
        host_lookups.tables_of(layer) is not None
        or any(isinstance(weight, MeshVariable) for weight in weights)
        or any(id(x) not in on_host for x in inputs)
    ):
        return False
    if weights:
        return isinstance(layer, _ADAPTED)
    return (
        isinstance(layer, LOOKUPS)
        or (
            any(id(x) in needed for x in node.outputs)
            and not isinstance(layer, keras.Model)
            and not getattr(layer, "variables", ())
        )
        or any(map(_is_string, inputs))
        or (
            isinstance(layer, keras.layers.CategoryEncoding)
            and all(id(x) in computed for x in inputs)
        )
    )


def _is_string(x: Any) -> bool:
    return keras.backend.standardize_dtype(x.dtype) == "string"
