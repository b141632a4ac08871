"""Reads a Keras model for the planner: its weights, layouts and their costs.

`problem_of_model` returns the input of the search. It traces the model once
(`traced_model.py`), divides the weights into groups (`layout_choices.py`) and
computes the memory and the time of each layout (`layout_costs.py`). Nothing is
allocated, so the weights can be pending. The names of layers only appear in
the names of items and keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import checks, keras_private
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.keras3 import context as mesh_context
from tf_layoutmap.layout.mesh import device_mesh, shard_shapes
from tf_layoutmap.layout.variable_names import ObjectPaths
from tf_layoutmap.planning import budgets, map_keys, search, traced_model
from tf_layoutmap.planning.costs import MachineCosts
from tf_layoutmap.planning.layout_choices import (
    Group,
    Grouping,
    MeshAxes,
    Option,
)
from tf_layoutmap.planning.layout_costs import Costs, LayoutCosts, Spread
from tf_layoutmap.planning.plan import Plan, Target
from tf_layoutmap.planning.planned_map import keys_and_axes as keys_and_axes
from tf_layoutmap.planning.planned_map import layout_map_of as layout_map_of
from tf_layoutmap.planning.problem import Axes, Choice, Item, Problem
from tf_layoutmap.planning.slot_variables import SlotVariables
from tf_layoutmap.planning.step_graph import StepGraph

# Used if the machine has not been measured: a device of a small machine.
DEFAULT_COSTS = MachineCosts(
    row_seconds={64: 1e-7, 1024: 6e-7},
    table_seconds=1e-4,
    id_seconds=1e-8,
    flops_per_second=3e10,
    memory_bytes_per_second=5e9,
    collective_latency={2: 3e-5, 8: 1e-4},
    collective_bytes_per_second={2: 2e9, 8: 1e9},
    gather_bytes_per_second={2: 4e9, 8: 2e9},
    server_latency=1e-4,
    server_bytes_per_second=1e9,
)


# Without a memory limit, items with at most this share of the bytes of a model
# are replicated.
_SMALL = 1e-3


@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """The weights of a model, and what is known about each of them.

    Attributes:
      variables: The weights, in the order of the model.
      owners: The layer of each weight, or None.
      names: All names of each weight; the first one is the preferred one.
    """

    variables: list[Any]
    owners: list[Any]
    names: list[list[str]]

    @classmethod
    def of_model(cls, model: Any) -> ModelWeights:
        variables = list(model.weights)
        layers = assignments.layers_of_variables(model)
        owners = [layers.get(id(v)) for v in variables]
        paths = ObjectPaths([model])
        names = [paths.of_variable(v, o) for v, o in zip(variables, owners)]
        return cls(variables, owners, map_keys.preferred_first(names))

    def unique_names(self) -> list[str]:
        """Returns one name per weight; no two weights have the same name."""
        unique: dict[str, None] = {}
        for names in self.names:
            name, number = names[0], 2
            while name in unique:
                name, number = f"{names[0]} ({number})", number + 1
            unique[name] = None
        return list(unique)


def problem_of_model(
    model: Any,
    mesh: Any,
    memory: Any = None,
    optimizer: Any = None,
    batch_size: int = 32,
    *,
    batch_dim: str | None = None,
    pins: Mapping[str, str] | None = None,
    costs: Costs | None = None,
    inputs: Any = None,
    length: int | None = None,
    notes: list[str] | None = None,
) -> Problem:
    """Returns the items of a Keras model on a mesh, with their layouts.

    Args:
      model: Keras 3 model, with or without a mesh. The weights must exist, but
        they may be pending.
      mesh: `dtensor.Mesh`, `DeviceMesh`, or a dict with the size of each axis.
      memory: Bytes of each device, for example `"24GiB"`. None shards each item
        of more than 0.1 % of the bytes, if a layout exists for which a step
        gathers no weights, and allows the bytes of the fastest such plan.
      optimizer: Optimizer of Keras 3 or its name. None uses the optimizer with
        which the model was compiled, or Adam.
      batch_size: Number of samples per step.
      batch_dim: Mesh axis that shards batches. None selects the axis named
        `"batch"` or `"data"`, if any.
      pins: Choices that the caller fixes, by item or weight. Only used if
        `memory` is None, so that the pinned choices fit.
      costs: Speed of the machine.
      inputs: A batch of inputs. Required only for a subclassed model whose
        inputs cannot be derived.
      length: Size of unknown dimensions of the inputs, such as the length of a
        text.
      notes: List to which sentences about the assumptions are added.

    Returns:
      A `Problem` with one item per table and per group of weights. Layers that
      repeat share an item.

    Raises:
      TypeError: If `model` is not a Keras 3 model, or `optimizer` is not an
        optimizer of Keras 3.
      ValueError: If the model has no weights yet.
    """
    checks.check_type("model", model, keras.layers.Layer, "a Keras 3 model")
    if not model.weights:
        raise ValueError(
            "Argument `model` must have weights. Received: model "
            f"{model.name!r}, whose layers are not built. Build the model or "
            "call it with a batch."
        )
    sizes, axes = _axes_of_mesh(mesh, batch_dim)
    # New objects must not belong to an open scope.
    with keras_private.separate_state(), mesh_context.activated(None):
        return _problem(
            model,
            sizes,
            axes,
            memory,
            optimizer,
            batch_size,
            pins or {},
            costs or DEFAULT_COSTS,
            inputs,
            length,
            [] if notes is None else notes,
        )


def _problem(
    model: Any,
    sizes: Mapping[str, int],
    axes: MeshAxes,
    memory: Any,
    optimizer: Any,
    batch_size: int,
    pins: Mapping[str, str],
    costs: Costs,
    inputs: Any,
    length: int | None,
    notes: list[str],
) -> Problem:
    weights = ModelWeights.of_model(model)
    try:
        graph = traced_model.trace(
            model,
            weights.variables,
            batch_size=batch_size,
            length=length,
            inputs=inputs,
        )
    except traced_model.NotTracedError as error:
        notes.append(
            "Each layer was planned separately, and the times are not "
            f"comparable, because {error}."
        )
        graph = traced_model.graph_of_layers(
            weights.variables, weights.owners, batch_size
        )
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        optimizer = "adam"
        notes.append("The optimizer is assumed to be Adam.")
    return _Reader(
        model, weights, graph, axes, SlotVariables(optimizer), costs
    ).problem(math.prod(sizes.values()), memory, pins)


def _axes_of_mesh(
    mesh: Any, batch_dim: str | None
) -> tuple[dict[str, int], MeshAxes]:
    sizes = dict(
        mesh if isinstance(mesh, Mapping) else device_mesh.axis_sizes(mesh)
    )
    if batch_dim is None:
        batch_dim = next((n for n in ("batch", "data") if n in sizes), None)
    else:
        checks.check_one_of("batch_dim", batch_dim, list(sizes))
    return sizes, MeshAxes(sizes, batch_dim)


class _Reader:
    """Creates the items of one model."""

    def __init__(
        self,
        model: Any,
        weights: ModelWeights,
        graph: StepGraph,
        mesh: MeshAxes,
        slots: SlotVariables,
        costs: Costs,
    ):
        self._model, self._weights, self._graph = model, weights, graph
        self._mesh, self._slots = mesh, slots
        self._names = weights.unique_names()
        self._shapes = [tuple(v.shape) for v in weights.variables]
        self._itemsizes = [tf.as_dtype(v.dtype).size for v in weights.variables]
        self._trainable = [bool(v.trainable) for v in weights.variables]
        self._unnamed = map_keys.without_own_name(weights.names)
        self._machine = costs

    def _layout_costs(self, groups: Sequence[Group]) -> LayoutCosts:
        return LayoutCosts(
            self._graph,
            self._shapes,
            self._itemsizes,
            self._trainable,
            self._slot_bytes,
            self._mesh,
            self._machine,
            (
                option.shared
                for group in groups
                for option in group.options
                if option.shared is not None
            ),
        )

    def _slot_bytes(self, weight: int, local: tuple[int, ...]) -> int:
        variable = self._weights.variables[weight]
        shape = self._shapes[weight]
        # A table with its own optimizer.
        num_bytes = getattr(variable, "num_slot_bytes", None)
        if num_bytes is not None:
            return num_bytes(local)
        return sum(
            slot.num_bytes(shape, local)
            for slot in self._slots.of_weight(len(shape), variable.dtype)
        )

    def _check(self, weight: int, axes: Axes) -> str | None:
        """Returns why a weight does not support axes, or None."""
        variable = self._weights.variables[weight]
        owner = self._weights.owners[weight]
        shape, sizes = self._shapes[weight], self._mesh.sizes
        problems = []
        if getattr(variable, "pads_rows", False):
            problems += shard_shapes.padding_problems(axes, shape, sizes)
            shape = shard_shapes.padded_rows(axes, shape, sizes)
        problems += shard_shapes.fit_problems(axes, shape, sizes)
        if owner is not None:
            problems += assignments.weight_problems(
                owner, variable, axes, True, dict(sizes)
            )
        if any(axes) and weight in self._unnamed:
            problems.append(
                "another weight has the same names, so that a layout map "
                "cannot distinguish them; give each layer a different name"
            )
        if not problems:
            return None
        return f"{self._names[weight]} {self._shapes[weight]}: {problems[0]}"

    def problem(
        self, num_devices: int, memory: Any, pins: Mapping[str, str]
    ) -> Problem:
        gathered = frozenset(
            i
            for i, owner in enumerate(self._weights.owners)
            if owner is not None and assignments.gathers_all_layouts(owner)
        )
        groups = Grouping(
            self._graph, self._shapes, self._mesh, self._check, gathered
        ).groups()
        if memory is None:
            groups = [_without_trades(group) for group in groups]
        merged: dict[tuple, list[Group]] = {}
        for number, group in enumerate(groups):
            key = self._signature(group)
            if group.kind == "embedding":
                key = (*key, number)
            merged.setdefault(key, []).append(group)
        layout_costs = self._layout_costs(groups)
        spreads = _spreads(layout_costs, groups)
        items, used = [], set()
        for same in merged.values():
            items.append(self._item(same, used, layout_costs, spreads))
        fixed = {
            "activations": self._activations(),
            "other variables": self._other_bytes(),
        }
        fixed = {part: size for part, size in fixed.items() if size}
        problem = Problem(
            tuple(f"device {i}" for i in range(num_devices)),
            (0,) * num_devices,
            tuple(items),
            fixed,
            layout_costs.fixed_seconds(groups),
            {
                name: layout_costs.seconds_of_spread(spread)
                for name, spread in spreads.items()
            },
        )
        is_limited = memory is not None
        if memory is None:
            memory = budgets.default_memory(problem, pins, _SMALL)
        return dataclasses.replace(
            problem,
            budgets=budgets.read_budgets(memory, num_devices),
            is_limited=is_limited,
        )

    def _signature(self, group: Group) -> tuple:
        weights = tuple(
            (self._shapes[w], self._itemsizes[w], self._trainable[w])
            for w in group.weights
        )
        return (
            self._kind(group),
            weights,
            tuple(
                (
                    option.name,
                    option.refused is None,
                    tuple(option.axes[w] for w in group.weights),
                )
                for option in group.options
            ),
        )

    def _kind(self, group: Group) -> str:
        """Returns the kind of an item of a group."""
        owners = [self._weights.owners[w] for w in group.weights]
        is_recurrent = all(
            owner is not None and assignments.is_recurrent(owner)
            for owner in owners
        )
        if is_recurrent and group.kind in ("mlp", "matrix", "recurrent"):
            return "recurrent"
        return group.kind

    def _item(
        self,
        same: list[Group],
        used: set[str],
        layout_costs: LayoutCosts,
        spreads: Mapping[str, Spread],
    ) -> Item:
        """Returns an item of repeated groups.

        Args:
          same: The groups.
          used: Names of the items so far.
          layout_costs: Memory and time of layouts.
          spreads: The dimensions that can be sharded outside of a group.
        """
        choices = []
        for number, option in enumerate(same[0].options):
            memory: dict[str, int] = {}
            seconds: dict[str, float] = {}
            layouts: dict[str, Axes] = {}
            spread: set[Spread] = set()
            more: dict[str, dict[str, float]] = {}
            for group in same:
                group_option: Option = group.options[number]
                _add(memory, layout_costs.memory(group_option.axes))
                if group_option.refused is None:
                    _add(seconds, layout_costs.seconds(group, group_option))
                    spread |= layout_costs.spread(group, group_option)
                    for name, outside in spreads.items():
                        cost = layout_costs.seconds_with_spread(
                            group, group_option, outside
                        )
                        if any(cost.values()):
                            _add(more.setdefault(name, {}), cost)
                layouts.update(
                    (self._names[w], a) for w, a in group_option.axes.items()
                )
            choices.append(
                Choice(
                    option.name,
                    option.sentence,
                    memory,
                    seconds,
                    layouts=layouts,
                    refused=option.refused,
                    causes=tuple(
                        name
                        for name, outside in spreads.items()
                        if outside in spread
                    ),
                    seconds_if=more,
                )
            )
        weights = [w for group in same for w in group.weights]
        name = map_keys.name_of_item(
            [[self._names[w] for w in group.weights] for group in same]
        )
        kind = self._kind(same[0])
        if kind == "vector":
            shape = self._shapes[weights[0]]
            name = f"vectors of shape {shape}"
        elif not name.strip("*."):
            name = kind
        if name in used:
            name = self._names[weights[0]]
        unique, number = name, 2
        while unique in used:
            unique, number = f"{name} ({number})", number + 1
        used.add(unique)
        keys = map_keys.keys_of_roles(
            [
                [group.weights[i] for group in same]
                for i in range(len(same[0].weights))
            ],
            self._weights.names,
        )
        return Item(
            unique,
            kind,
            {self._names[w]: self._shapes[w] for w in weights},
            tuple(choices),
            {self._names[w]: key for w, key in keys.items()},
        )

    def _activations(self) -> int:
        """Returns the estimated bytes of activations that a step keeps.

        The result of each product, convolution and lookup is kept for the
        gradients, and so is the result of the operation after it.
        """
        return sum(
            2
            * self._graph.tensors[tensor].num_bytes
            // (self._mesh.batch_parts if self._graph.is_batch(tensor) else 1)
            for op in self._graph.ops
            if op.kind not in ("other", "sum")
            for tensor in op.outputs
            if self._graph.is_activation[tensor]
        )

    def _other_bytes(self) -> int:
        """Returns the bytes of seeds and of counters of the optimizer."""
        known = {id(v) for v in self._weights.variables}
        return self._slots.fixed_bytes + sum(
            math.prod(tuple(v.shape)) * tf.as_dtype(v.dtype).size
            for v in self._model.non_trainable_variables
            if id(v) not in known
        )


def _spreads(
    layout_costs: LayoutCosts, groups: Sequence[Group]
) -> dict[str, Spread]:
    """Returns the dimensions that options shard outside of their group."""
    spreads: set[Spread] = set()
    for group in groups:
        for option in group.options:
            if option.refused is None:
                spreads |= layout_costs.spread(group, option)
    return {
        f"activations {number} over {axis}": (root, axis)
        for number, (root, axis) in enumerate(sorted(spreads))
    }


def _without_trades(group: Group) -> Group:
    """Sets `refused` of options that save memory but take more time."""
    shared = next(
        (
            option.name
            for option in group.options
            if option.shared is not None and option.refused is None
        ),
        None,
    )
    options = []
    for option in group.options:
        if option.refused is None:
            if option.gathers:
                option = dataclasses.replace(
                    option,
                    refused="each step would gather weights, which saves "
                    "memory but takes time; pass `memory` to allow it",
                )
            elif (
                shared is not None
                and option.shared is None
                and (option is not group.options[0])
            ):
                option = dataclasses.replace(
                    option,
                    refused="each step would exchange more data than with "
                    f"{shared!r}; pass `memory` to allow it",
                )
        options.append(option)
    return dataclasses.replace(group, options=tuple(options))


def _add(total: dict[str, Any], parts: Mapping[str, Any]) -> None:
    for part, value in parts.items():
        total[part] = total.get(part, 0) + value


def plan_model(
    model: Any,
    mesh: Any,
    *,
    memory: Any = None,
    optimizer: Any = None,
    batch_size: int | None = None,
    pins: Mapping[str, str] | None = None,
    costs: Costs | None = None,
    batch_dim: str | None = None,
    inputs: Any = None,
    length: int | None = None,
) -> Plan:
    """Returns the plan of a model on a mesh.

    The arguments and errors are the same as for `problem_of_model` and
    `search.solve`.
    """
    sizes, _ = _axes_of_mesh(mesh, batch_dim)
    batch_size = batch_size or 32
    notes = [f"The plan assumes batches of {batch_size:,} samples."]

    def build(
        used: Any = mesh,
        rule: Any = optimizer,
        samples: int = batch_size,
        notes: list[str] | None = None,
    ) -> Problem:
        return problem_of_model(
            model,
            used,
            memory,
            rule,
            samples,
            batch_dim=batch_dim,
            pins=pins,
            costs=costs,
            inputs=inputs,
            length=length,
            notes=notes,
        )

    def suggest() -> Iterator[str]:
        last = list(sizes)[-1]

        def larger(size: int) -> Problem:
            return build({**sizes, last: size})

        size = search.fewest(larger, sizes[last], pins, highest=64)
        if size is not None:
            target = Target("mesh", {**sizes, last: size})
            yield f"{target}"
        if search.fits(build(rule="sgd"), pins):
            yield "the optimizer SGD"
        samples = batch_size // 2
        lowest = sizes.get("batch", sizes.get("data", 1))
        while samples >= lowest:
            if search.fits(build(samples=samples), pins):
                yield f"batches of {samples:,} samples (batch_size={samples})"
                return
            samples //= 2

    solution = search.solve(build(notes=notes), pins, suggest=suggest)
    return Plan(solution, Target("mesh", sizes), notes)


def check_layouts(
    problem: Problem,
    selected: Mapping[str, str],
    model: Any,
    assign: Callable[[list[Any]], list[assignments.LayoutAssignment]],
) -> None:
    """Checks that a layout map selects the planned layout of each weight.

    Args:
      problem: The items of the model.
      selected: Name of the selected choice, by item.
      model: The model.
      assign: Function that returns the layouts that the map selects.

    Raises:
      RuntimeError: If a weight would get another layout.
    """
    planned: dict[str, Axes] = {}
    for item in problem.items:
        planned.update(_selected(item, selected).layouts)
    weights = ModelWeights.of_model(model)
    wrong = [
        f"{name}: {assignment.axes} instead of {planned[name]}"
        for name, assignment in zip(
            weights.unique_names(), assign(weights.variables)
        )
        if getattr(assignment.variable, "_given_layout", None) is None
        and assignment.axes != planned[name]
    ]
    if wrong:
        raise RuntimeError(
            "The keys of a planned layout map must select the planned layouts. "
            f"Received: {'; '.join(wrong[:5])}. Give layers different names."
        )


def _selected(item: Item, selected: Mapping[str, str]) -> Choice:
    return next(c for c in item.choices if c.name == selected[item.name])
