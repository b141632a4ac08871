"""Memory and time of the layouts of a group of weights.

The memory is exact for weights and slot variables. The time is an estimate: the
operations that each device computes, and the tensors that devices exchange.
This module does not depend on TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from tf_layoutmap.layout.mesh import shard_shapes
from tf_layoutmap.planning.layout_choices import Group, MeshAxes, Option
from tf_layoutmap.planning.problem import Axes
from tf_layoutmap.planning.step_graph import (
    Dim,
    Op,
    StepGraph,
    Use,
    is_view,
)

# The gradients of a product are two products of the same size.
_FORWARD_AND_BACKWARD = 3
# Copies of a weight, and of each slot variable, that take as long as the
# operations of an optimizer.
_WEIGHT_COPIES, _SLOT_COPIES = 1, 3
# Copies of a tensor that take as long as an elementwise operation and its
# gradient, and as long as the loss of a model output and its gradient.
_COPIES_OF_OP, _COPIES_OF_LOSS = 3, 16
# Collectives of a loss over a sharded dimension.
_SUMS_OF_LOSS = 4
# Share of the products of a weight that compute only a shard if the
# activations are sharded, but the weight is not.
_SHARDED_PRODUCTS = 2 / 3


class Costs(Protocol):
    """Speed of a machine (see `MachineCosts`)."""

    def seconds_of_collective(
        self, num_bytes: float, num_devices: int
    ) -> float: ...

    def seconds_of_gather(
        self, num_bytes: float, num_devices: int
    ) -> float: ...

    def seconds_of_flops(self, num_flops: float) -> float: ...

    def seconds_of_copy(self, num_bytes: float) -> float: ...


# A class of dimensions that is sharded outside of a group, and its mesh axis.
Spread = tuple[Dim, str]

# Returns the bytes per device of the slot variables of a weight with a local
# shape.
SlotBytes = Callable[[int, tuple[int, ...]], int]


class LayoutCosts:
    """Computes the memory and the time of layouts."""

    def __init__(
        self,
        graph: StepGraph,
        shapes: Sequence[tuple[int, ...]],
        itemsizes: Sequence[int],
        trainable: Sequence[bool],
        slot_bytes: SlotBytes,
        mesh: MeshAxes,
        costs: Costs,
        shared_roots: Iterable[Dim] = (),
    ):
        """Initializes the object.

        Args:
          graph: The operations of the model.
          shapes: Shape of each weight.
          itemsizes: Bytes per element of each weight.
          trainable: Whether each weight is trained.
          slot_bytes: Returns the bytes of slot variables.
          mesh: Axes of the mesh.
          costs: Speed of the machine.
          shared_roots: Classes that options of the groups share.
        """
        self._graph, self._shapes, self._itemsizes = graph, shapes, itemsizes
        self._trainable, self._slot_bytes = trainable, slot_bytes
        self._mesh, self._costs = mesh, costs
        self._shared_roots = frozenset(shared_roots)
        self._find_work()

    def local_shape(self, weight: int, axes: Axes) -> tuple[int, ...]:
        return shard_shapes.local_shape(
            axes, self._shapes[weight], self._mesh.sizes
        )

    def memory(self, axes: Mapping[int, Axes]) -> dict[str, int]:
        """Returns the bytes on each device, by part."""
        num_bytes = {"weights": 0, "slot variables": 0, "gradients": 0}
        for weight, weight_axes in axes.items():
            local = self.local_shape(weight, weight_axes)
            size = math.prod(local) * self._itemsizes[weight]
            num_bytes["weights"] += size
            if self._trainable[weight]:
                num_bytes["slot variables"] += self._slot_bytes(weight, local)
                # A gradient is computed before it is sharded along the axis of
                # the batch.
                num_bytes["gradients"] += (
                    math.prod(
                        self.local_shape(
                            weight, self._without_batch(weight_axes)
                        )
                    )
                    * self._itemsizes[weight]
                )
        return num_bytes

    def _without_batch(self, axes: Axes) -> Axes:
        return tuple(None if a == self._mesh.batch else a for a in axes)

    def seconds(self, group: Group, option: Option) -> dict[str, float]:
        """Returns the time per step on each device, by part.

        The time does not contain the costs of dimensions that remain sharded
        after the group (see `spread`).
        """
        compute, collectives = 0.0, 0.0
        for weight in group.weights:
            axes = option.axes[weight]
            collectives += self._seconds_of_weight(weight, axes)
            if self._trainable[weight]:
                compute += self._seconds_of_update(weight, axes)
            for use in self._graph.uses[weight]:
                compute += self._seconds_of_product(use, axes)
                collectives += self._seconds_of_use(use, axes)
            if group.kind == "recurrent" and any(self._without_batch(axes)):
                collectives += self._gather(
                    math.prod(self._shapes[weight]) * self._itemsizes[weight],
                    self._axis_of(self._without_batch(axes)),
                )
            if (
                not self._graph.uses[weight]
                and weight not in self._graph.added_to
                and any(self._without_batch(axes))
            ):
                for _ in self._graph.other_uses[weight]:
                    collectives += 2 * self._gather(
                        math.prod(self._shapes[weight])
                        * self._itemsizes[weight],
                        self._axis_of(self._without_batch(axes)),
                    )
        more_compute, more = self._seconds_between(group, option)
        sharded = self._sharded_classes(group, option)
        for root in sorted(self._classes_of(group)):
            axis = sharded.get(root)
            parts = 1 if axis is None else self._mesh.sizes[axis]
            compute += self._elementwise(root) / parts
            if axis is not None and root in self._output_classes:
                # The loss is reduced over the sharded dimension.
                collectives += _SUMS_OF_LOSS * self._sum(0, axis)
        seconds = {
            "compute": compute + more_compute,
            "collectives": collectives + more,
        }
        for spread in sorted(self._spread(group, option)):
            if self._is_internal(spread, group):
                for part in (
                    self.seconds_of_spread(spread),
                    self.seconds_with_spread(group, option, spread),
                ):
                    for name, value in part.items():
                        seconds[name] += value
        return seconds

    def fixed_seconds(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the time of elementwise operations that no group contains."""
        owned = {root for group in groups for root in self._classes_of(group)}
        return {
            "compute": sum(
                self._elementwise(root)
                for root in sorted(self._work)
                if root not in owned
            )
        }

    def _seconds_of_update(self, weight: int, axes: Axes) -> float:
        """Returns the time of the optimizer, which uses one op at a time."""
        shape = self.local_shape(weight, axes)
        local = math.prod(shape) * self._itemsizes[weight]
        copied = _WEIGHT_COPIES * local + _SLOT_COPIES * self._slot_bytes(
            weight, shape
        )
        if self._is_table(weight):
            # The rows of the gradient are summed into dense tensors.
            copied += 2 * self._num_dense(weight) * local
        return self._costs.seconds_of_copy(copied)

    def _num_dense(self, weight: int) -> int:
        """Returns how many dense tensors an update of a table computes.

        Optimizers add the rows of a gradient to a slot variable or to the
        weight, and a mesh supports only dense additions.
        """
        shape = self._shapes[weight]
        weight_bytes = math.prod(shape) * self._itemsizes[weight]
        slots = self._slot_bytes(weight, shape) / max(weight_bytes, 1)
        return 2 if slots > 0.5 else 1

    def _is_table(self, weight: int) -> bool:
        return any(
            self._graph.ops[use.op].kind == "lookup"
            for use in self._graph.uses[weight]
        )

    def _seconds_of_product(self, use: Use, axes: Axes) -> float:
        op = self._graph.ops[use.op]
        parts = self._mesh.batch_parts if self._by_batch(use) else 1
        parts *= math.prod(
            self._mesh.sizes[a]
            for a in self._without_batch(axes)
            if a is not None
        )
        return self._costs.seconds_of_flops(
            self._num_products(use) * op.flops / parts
        )

    def _num_products(self, use: Use) -> int:
        """Returns the number of products of a step: results and gradients."""
        return 2 + any(
            self._depends_on_weights[t]
            for t in self._graph.ops[use.op].inputs
            if self._graph.is_activation[t]
        )

    def _axis_of(self, axes: Axes) -> str:
        return next(a for a in axes if a is not None)

    def _by_batch(self, use: Use) -> bool:
        return self._graph.is_batch(self._graph.ops[use.op].outputs[0])

    def _activation_bytes(self, tensor: int) -> float:
        parts = self._mesh.batch_parts if self._graph.is_batch(tensor) else 1
        return self._graph.tensors[tensor].num_bytes / parts

    def _sum(self, num_bytes: float, axis: str) -> float:
        return self._costs.seconds_of_collective(
            num_bytes, self._mesh.sizes[axis]
        )

    def _gather(self, num_bytes: float, axis: str) -> float:
        return self._costs.seconds_of_gather(num_bytes, self._mesh.sizes[axis])

    def _seconds_of_weight(self, weight: int, axes: Axes) -> float:
        """Returns the time of collectives along the axis of the batch."""
        batch = self._mesh.batch
        if batch is None or self._mesh.batch_parts == 1:
            return 0.0
        trained = self._trainable[weight]
        if self._is_table(weight):
            if any(axes):
                return 0.0
            size = math.prod(self._shapes[weight]) * self._itemsizes[weight]
            return trained * self._num_dense(weight) * self._sum(size, batch)
        size = (
            math.prod(self.local_shape(weight, self._without_batch(axes)))
            * self._itemsizes[weight]
        )
        # The gradients of all replicas are summed.
        seconds = self._sum(size, batch) if trained else 0.0
        if batch in axes:
            uses = max(len(self._graph.uses[weight]), 1)
            seconds += uses * self._gather(size, batch)
        return seconds

    def _seconds_of_use(self, use: Use, axes: Axes) -> float:
        """Returns the time of the collectives of one product."""
        op = self._graph.ops[use.op]
        if op.kind == "lookup":
            return self._seconds_of_lookup(op, axes)
        result = self._activation_bytes(op.outputs[0])
        arguments = self._argument_bytes(op)
        seconds = 0.0
        for dim, axis in enumerate(self._without_batch(axes)):
            if axis is None:
                continue
            if dim in use.contracted:
                seconds += self._sum(result, axis)
                if op.kind == "convolution":
                    # The gradient of the argument is gathered.
                    seconds += self._gather(arguments, axis)
            elif dim in use.dims:
                if op.kind == "convolution":
                    seconds += self._gather(result, axis)
                # The gradient of the argument is summed.
                if self._num_products(use) > 2:
                    seconds += self._sum(arguments, axis)
        return seconds

    def _argument_bytes(self, op: Op) -> float:
        return sum(
            self._activation_bytes(t)
            for t in op.inputs
            if self._graph.is_activation[t]
        )

    def _seconds_of_lookup(self, op: Op, axes: Axes) -> float:
        """Returns the time of the collectives of a lookup and its gradient.

        The rows of all samples are exchanged, not the table.
        """
        batch, seconds = self._mesh.batch, 0.0
        if not any(axes):
            return seconds
        rows = self._graph.tensors[op.outputs[0]].num_bytes
        model = [a for a in self._without_batch(axes) if a is not None]
        if batch is not None:
            # Ids, and the gradients of the rows.
            seconds += self._gather(0, batch) + self._gather(
                rows / self._parts(axes[1:]), batch
            )
            if batch in axes:
                seconds += self._gather(rows, batch)
        if model and (axes[0] in model or self._is_along_batch(axes)):
            seconds += self._sum(rows / self._parts(axes[1:]), model[0])
        return seconds

    def _is_along_batch(self, axes: Axes) -> bool:
        return self._mesh.batch is not None and self._mesh.batch in axes

    def _parts(self, axes: Axes) -> int:
        return math.prod(self._mesh.sizes[a] for a in axes if a is not None)

    def _sharded_classes(self, group: Group, option: Option) -> dict[Dim, str]:
        """Returns the classes of dimensions that an option shards.

        The axis of the batch is not included.
        """
        sharded: dict[Dim, str] = {}
        for weight in group.weights:
            if self._is_table(weight) and self._is_along_batch(
                option.axes[weight]
            ):
                continue
            for use in self._graph.uses[weight]:
                op = self._graph.ops[use.op]
                if op.kind == "convolution" or group.kind == "recurrent":
                    continue
                for dim, axis in enumerate(
                    self._without_batch(option.axes[weight])
                ):
                    if axis is None or (op.kind == "lookup" and dim == 0):
                        continue
                    if dim in use.contracted or dim in use.dims:
                        root = self._graph.class_of_weight(weight, dim)
                        sharded[root] = axis
        return sharded

    def spread(self, group: Group, option: Option) -> set[Spread]:
        """Returns the classes that an option shards outside of the group.

        DTensor keeps the result of a product with a sharded kernel sharded
        until an operation requires the complete dimension. For example, with
        sharded columns of one layer, all residual connections are sharded.

        Returns:
          Pairs of a class of dimensions and a mesh axis.
        """
        return {
            spread
            for spread in self._spread(group, option)
            if not self._is_internal(spread, group)
        }

    def _spread(self, group: Group, option: Option) -> set[Spread]:
        return {
            (root, axis)
            for root, axis in self._sharded_classes(group, option).items()
            if root != option.shared and root not in self._output_classes
        }

    def _is_internal(self, spread: Spread, group: Group) -> bool:
        """Returns whether a class has no dimensions of other groups."""
        members = self._graph.members.get(spread[0], ())
        return {weight for weight, _ in members} <= set(group.weights)

    def seconds_of_spread(self, spread: Spread) -> dict[str, float]:
        """Returns the time of the operations of a sharded class.

        This is the time of operations without weights. Reductions over the
        dimension require collectives; other operations need less time.
        """
        root, axis = spread
        graph = self._graph
        collectives = 0.0
        for op in graph.ops:
            if op.kind not in ("other", "sum") or not op.outputs:
                continue
            for i, tensor in enumerate(op.inputs):
                if not graph.is_activation[tensor]:
                    continue
                kept = {dim for (j, dim), _ in op.same if j == i}
                if any(
                    graph.class_of(tensor, d) == root and d not in kept
                    for d in range(len(graph.tensors[tensor].shape))
                ):
                    # One collective for the result, one for the gradient.
                    collectives += 2 * self._sum(
                        self._activation_bytes(op.outputs[0]), axis
                    )
        parts = self._mesh.sizes[axis]
        return {
            "compute": (1 / parts - 1) * self._elementwise(root),
            "collectives": collectives,
        }

    def seconds_with_spread(
        self, group: Group, option: Option, spread: Spread
    ) -> dict[str, float]:
        """Returns the additional time of a group if a class is sharded.

        Args:
          group: The group.
          option: The layouts of its weights.
          spread: Class of dimensions of activations, and the mesh axis.
        """
        root, axis = spread
        compute, collectives = 0.0, 0.0
        for weight in group.weights:
            axes = self._without_batch(option.axes[weight])
            rank = len(self._shapes[weight])
            dims = [
                d
                for d in range(rank)
                if self._graph.class_of_weight(weight, d) == root
            ]
            if not dims or any(axes[d] == axis for d in dims):
                continue
            local = (
                math.prod(self.local_shape(weight, axes))
                * self._itemsizes[weight]
            )
            if not self._graph.uses[weight]:
                if self._trainable[weight]:
                    # The gradient is gathered.
                    collectives += self._gather(local, axis)
                continue
            for use in self._graph.uses[weight]:
                op = self._graph.ops[use.op]
                if op.kind == "convolution" or group.kind == "recurrent":
                    continue
                arguments = self._argument_bytes(op)
                result = self._activation_bytes(op.outputs[0])
                if op.kind == "lookup":
                    if not any(option.axes[weight]):
                        # Dense gradients of the table are gathered.
                        collectives += self._num_dense(weight) * self._gather(
                            local, axis
                        )
                    else:
                        collectives += self._gather(result, axis)
                    continue
                is_row = any(d in use.contracted for d in dims)
                if axis in axes:
                    # Another dimension of the weight is sharded along the axis.
                    collectives += self._gather(
                        arguments if is_row else result, axis
                    )
                    continue
                collectives += self._gather(local, axis)
                if is_row:
                    collectives += self._sum(result, axis)
                elif self._num_products(use) > 2:
                    collectives += self._sum(arguments, axis)
                compute -= (
                    _SHARDED_PRODUCTS
                    * (1 - 1 / self._mesh.sizes[axis])
                    * self._seconds_of_product(use, option.axes[weight])
                )
        return {"compute": compute, "collectives": collectives}

    def _elementwise(self, root: Dim) -> float:
        """Returns the time of elementwise operations on a class."""
        return self._costs.seconds_of_copy(self._work.get(root, 0.0))

    def _classes_of(self, group: Group) -> set[Dim]:
        """Returns the classes whose elementwise operations a group contains."""
        classes = {
            option.shared
            for option in group.options
            if option.shared is not None
        }
        for weight in group.weights:
            for use in self._graph.uses[weight]:
                classes.update(
                    root
                    for dim in use.dims
                    for root in [self._graph.class_of_weight(weight, dim)]
                    if root in self._output_classes
                )
        return classes

    def _find_work(self) -> None:
        """Computes the bytes that elementwise operations copy, by class.

        The class is a class that a group can shard, or else the class of the
        last dimension.
        """
        graph = self._graph
        consumed = {t for op in graph.ops for t in op.inputs}
        self._depends_on_weights = [
            tensor.weight is not None for tensor in graph.tensors
        ]
        self._work: dict[Dim, float] = {}
        self._output_classes: set[Dim] = set()
        for op in graph.ops:
            depends = any(self._depends_on_weights[t] for t in op.inputs)
            for tensor in op.outputs:
                self._depends_on_weights[tensor] |= depends
                rank = len(graph.tensors[tensor].shape)
                if not depends or not graph.is_activation[tensor] or not rank:
                    continue
                is_output = tensor not in consumed
                classes = [graph.class_of(tensor, d) for d in range(rank)]
                root = next(
                    (
                        dim_class
                        for dim_class in classes
                        if dim_class in self._shared_roots
                    ),
                    classes[-1],
                )
                if is_output:
                    self._output_classes.add(root)
                copies = _COPIES_OF_LOSS * is_output
                # A reshape copies nothing.
                shape = graph.tensors[tensor].shape
                is_reshape = is_view(graph, op) and all(
                    graph.tensors[t].shape != shape for t in op.inputs
                )
                if op.kind in ("other", "sum") and not is_reshape:
                    copies += _COPIES_OF_OP
                self._work[root] = self._work.get(
                    root, 0.0
                ) + copies * self._activation_bytes(tensor)

    def _seconds_between(
        self, group: Group, option: Option
    ) -> tuple[float, float]:
        """Returns the time of operations between the products of a group.

        Returns:
          The time of products of activations, such as attention scores, and
          the time of collectives.
        """
        graph = self._graph
        roots = {
            option.shared
            for option in group.options
            if option.shared is not None
        }
        if not roots:
            return 0.0, 0.0
        axis = None
        if option.shared is not None:
            axis = next(
                a
                for weight_axes in option.axes.values()
                for a in self._without_batch(weight_axes)
                if a is not None
            )
        compute, collectives = 0.0, 0.0
        for op in graph.ops:
            if op.kind in ("convolution", "lookup"):
                continue
            inputs = [
                (i, t)
                for i, t in enumerate(op.inputs)
                if graph.is_activation[t]
            ]
            if len(inputs) == 2 and op.kind == "product":
                classes = {
                    graph.class_of(t, d)
                    for _, t in inputs
                    for d in range(len(graph.tensors[t].shape))
                }
                if not classes & roots:
                    continue
                parts = (
                    self._mesh.batch_parts
                    if graph.is_batch(op.outputs[0])
                    else 1
                )
                if axis is not None and option.shared in classes:
                    parts *= self._mesh.sizes[axis]
                compute += self._costs.seconds_of_flops(
                    _FORWARD_AND_BACKWARD * op.flops / parts
                )
            if axis is None:
                continue
            kept = {dim for dim, _ in op.same}
            summed = {dim for pair in op.contracted for dim in pair}
            for i, tensor in inputs:
                for d in range(len(graph.tensors[tensor].shape)):
                    if graph.class_of(tensor, d) != option.shared:
                        continue
                    if (i, d) in summed:
                        if len(inputs) == 2:
                            collectives += self._sum(
                                self._activation_bytes(op.outputs[0]), axis
                            )
                    elif (i, d) not in kept and op.outputs:
                        collectives += 2 * self._gather(
                            self._activation_bytes(tensor), axis
                        )
        return compute, collectives
