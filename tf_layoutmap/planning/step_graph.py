"""The operations of a model, and the dimensions that are sharded together.

`StepGraph` describes which dimensions of the inputs and outputs of each
operation correspond. Dimensions that correspond, directly or through a chain of
operations, form a class. If one dimension of a class is sharded along a mesh
axis, the other dimensions of the class can be sharded along the same axis
without communication. For example, the columns of the first matrix of an MLP,
its bias and the rows of the second matrix form a class.

This module does not depend on TensorFlow, and does not use names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

# Index of an input or output of an operation, and a dimension of this tensor.
Dim = tuple[int, int]
Kind = Literal["product", "convolution", "lookup", "sum", "other"]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the graph.

    Attributes:
      shape: The size of each dimension; 0 if it is unknown.
      itemsize: Bytes per element.
      weight: Index of the weight whose value this tensor is; None for other
        tensors.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    weight: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation of the graph.

    Attributes:
      kind: `"product"` for matrix products and einsums, `"convolution"`,
        `"lookup"` if the first input is a table whose rows are looked up,
        `"sum"` for an elementwise sum, `"other"` otherwise.
      inputs: Indices of the input tensors.
      outputs: Indices of the output tensors.
      same: Pairs of a dimension of an input and a dimension of an output that
        correspond.
      contracted: Pairs of dimensions of two inputs over whose product the
        operation sums.
      flops: Floating-point operations of the unsharded operation.
      kernel: Of a convolution, the dimension of the kernel over which the
        operation sums (None for a depthwise convolution), the dimension of the
        kernel that contains the output channels, and the dimension of the
        output that contains them. The classes of these dimensions are not
        joined, because images are unsharded between layers.
    """

    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    same: tuple[tuple[Dim, Dim], ...] = ()
    contracted: tuple[tuple[Dim, Dim], ...] = ()
    flops: int = 0
    kernel: tuple[int | None, int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Use:
    """A product, convolution or lookup that uses a weight.

    Attributes:
      op: Index of the operation.
      contracted: Dimensions of the weight over which the operation sums.
      dims: Maps the other dimensions of the weight to dimensions of the output.
    """

    op: int
    contracted: tuple[int, ...]
    dims: dict[int, int]


def reshaped_dims(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns the dimensions that correspond in a reshape.

    If a reshape merges or splits dimensions, the first of the merged dimensions
    corresponds to the result.

    >>> reshaped_dims((8, 16, 4, 2), (128, 8))
    [(0, 0), (2, 1)]
    >>> reshaped_dims((8, 6), (8, 1, 2, 3))
    [(0, 0), (1, 2)]
    """
    left_dims = [d for d, size in enumerate(before) if size != 1]
    right_dims = [d for d, size in enumerate(after) if size != 1]
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left_dims) and j < len(right_dims):
        left, right = before[left_dims[i]], after[right_dims[j]]
        if not left or not right:
            break
        if left % right == 0 or right % left == 0:
            pairs.append((left_dims[i], right_dims[j]))
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                if i == len(left_dims):
                    return pairs
                left, i = left * before[left_dims[i]], i + 1
            else:
                if j == len(right_dims):
                    return pairs
                right, j = right * after[right_dims[j]], j + 1
    return pairs


class StepGraph:
    """Operations in the order of execution, and their classes of dimensions."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        ops: Sequence[Op],
        num_weights: int,
        batch: Sequence[int] = (),
        features: Sequence[int] = (),
    ):
        """Computes the classes.

        Args:
          tensors: The tensors.
          ops: The operations, in an order in which they can be executed.
          num_weights: Number of weights.
          batch: Inputs of the step, whose first dimension contains the samples.
          features: The inputs that are features, not ids or masks.
        """
        self._features = tuple(features)
        self.tensors, self.ops = list(tensors), list(ops)
        self.num_weights = num_weights
        self._parents: dict[Dim, Dim] = {}
        # Whether each tensor depends on the inputs of the step.
        self.is_activation = [False] * len(self.tensors)
        for tensor in batch:
            self.is_activation[tensor] = True
        for op in self.ops:
            if any(self.is_activation[t] for t in op.inputs):
                for tensor in op.outputs:
                    self.is_activation[tensor] = True
        self._join_all()
        self._batch = {self.class_of(t, 0) for t in batch}
        # Value of each tensor that is a weight, or a cast, reshaped or
        # transposed weight: the weight, and the dimension of the weight that
        # corresponds to each dimension of the tensor.
        self._values: dict[int, tuple[int, dict[int, int]]] = {}
        self.uses: list[list[Use]] = [[] for _ in range(num_weights)]
        # Weights that are combined with activations elementwise, and the
        # product to whose result each one is added.
        self.added_to: dict[int, int] = {}
        self.other_uses: list[list[int]] = [[] for _ in range(num_weights)]
        self.sizes: dict[Dim, set[int]] = {}
        self.members: dict[Dim, set[tuple[int, int]]] = {}
        self._collect()
        self._sources = self._find_sources()
        self._cyclic = self._find_cyclic()

    def _join_all(self) -> None:
        # Relative positions are looked up in a table and combined with masks,
        # but not with features. Many layers can add the same tensor, so it must
        # not join the dimensions of these layers.
        features = set(self._features)
        positions: set[int] = set()
        for op in self.ops:
            ids = {t for t in op.inputs if self.is_activation[t]}
            is_feature = bool(
                features.intersection(op.inputs)
                or op.kind in ("product", "convolution")
                or (op.kind == "lookup" and ids)
            )
            skipped: set[int] = set()
            if is_feature:
                features.update(op.outputs)
                if op.kind in ("sum", "other"):
                    skipped = {
                        i for i, t in enumerate(op.inputs) if t in positions
                    }
            elif op.kind == "lookup" or positions.intersection(op.inputs):
                positions.update(op.outputs)
            for (i, dim), (o, out) in op.same:
                if i not in skipped:
                    self._join((op.inputs[i], dim), (op.outputs[o], out))
            for (i, dim), (j, other) in op.contracted:
                self._join((op.inputs[i], dim), (op.inputs[j], other))

    def _join(self, left: Dim, right: Dim) -> None:
        left, right = self._root(left), self._root(right)
        if left != right:
            # The smaller pair is the representative, so that the result does
            # not depend on the order of the operations.
            self._parents[max(left, right)] = min(left, right)

    def _root(self, dim: Dim) -> Dim:
        while dim in self._parents:
            parent = self._parents[dim]
            if parent in self._parents:
                self._parents[dim] = self._parents[parent]
            dim = parent
        return dim

    def class_of(self, tensor: int, dim: int) -> Dim:
        """Returns the class of a dimension of a tensor."""
        return self._root((tensor, dim))

    def is_batch(self, tensor: int) -> bool:
        """Returns whether a dimension of a tensor contains the samples."""
        return any(
            self.class_of(tensor, dim) in self._batch
            for dim in range(len(self.tensors[tensor].shape))
        )

    def class_of_weight(self, weight: int, dim: int) -> Dim:
        """Returns the class of a dimension of a weight."""
        tensor = self._weight_tensors.get(weight)
        # A weight that no operation uses has its own classes.
        return (
            (-1 - weight, dim) if tensor is None else self._root((tensor, dim))
        )

    def _collect(self) -> None:
        self._weight_tensors: dict[int, int] = {}
        for number, tensor in enumerate(self.tensors):
            if tensor.weight is not None:
                self._weight_tensors[tensor.weight] = number
                self._values[number] = (
                    tensor.weight,
                    {d: d for d in range(len(tensor.shape))},
                )
            for dim, size in enumerate(tensor.shape):
                root = self._root((number, dim))
                if size:
                    self.sizes.setdefault(root, set()).add(size)
                if tensor.weight is not None:
                    self.members.setdefault(root, set()).add(
                        (tensor.weight, dim)
                    )
        # The weight whose product each tensor is.
        origins: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            self._collect_op(number, op, origins)

    def _collect_op(self, number: int, op: Op, origins: dict[int, int]) -> None:
        values = [self._values.get(t) for t in op.inputs]
        weights = [(i, v) for i, v in enumerate(values) if v is not None]
        if op.kind in ("product", "convolution", "lookup"):
            for i, (weight, dims) in weights:
                if op.kind == "lookup" and i:
                    self.other_uses[weight].append(number)
                    continue
                summed = {
                    d for pair in op.contracted for k, d in pair if k == i
                }
                out = {d: o for (k, d), (_, o) in op.same if k == i}
                if op.kind == "lookup":
                    summed = {0}
                if op.kernel is not None and i == 1:
                    rows, columns, channels = op.kernel
                    summed = set[int]() if rows is None else {rows}
                    out = {columns: channels}
                self.uses[weight].append(
                    Use(
                        number,
                        tuple(sorted(dims[d] for d in summed if d in dims)),
                        {dims[d]: o for d, o in out.items() if d in dims},
                    )
                )
                if op.kind != "lookup":
                    origins[op.outputs[0]] = weight
            return
        activations = [
            t
            for t in op.inputs
            if self.is_activation[t] and self.tensors[t].shape
        ]
        if not weights:
            if len(activations) == 1 and len(op.outputs) == 1:
                if activations[0] in origins and is_view(self, op):
                    origins[op.outputs[0]] = origins[activations[0]]
            return
        if not activations and len(weights) == 1 and len(op.outputs) == 1:
            # A view of a weight, such as a cast or a transposition.
            i, (weight, dims) = weights[0]
            out = {
                o: dims[d] for (k, d), (_, o) in op.same if k == i and d in dims
            }
            if is_view(self, op):
                self._values[op.outputs[0]] = weight, out
                return
        for _, (weight, _) in weights:
            self.other_uses[weight].append(number)
            if op.kind == "sum" and len(activations) == 1:
                source = origins.get(activations[0])
                if source is not None:
                    self.added_to.setdefault(weight, source)
                    origins[op.outputs[0]] = source

    def _find_sources(self) -> list[frozenset[int]]:
        """Returns the weights whose products each tensor is computed from.

        Products of the products are not included.
        """
        sources_of: list[frozenset[int]] = [frozenset()] * len(self.tensors)
        used: dict[int, set[int]] = {}
        for weight, uses in enumerate(self.uses):
            for use in uses:
                used.setdefault(use.op, set()).add(weight)
        for number, op in enumerate(self.ops):
            if op.kind in ("product", "convolution", "lookup"):
                sources = frozenset(used.get(number, ()))
            else:
                sources = frozenset[int]().union(
                    *(sources_of[t] for t in op.inputs)
                )
            for tensor in op.outputs:
                sources_of[tensor] = sources
        return sources_of

    def scores(self, root: Dim) -> set[int]:
        """Returns the weights that products of activations connect.

        Attention multiplies queries with keys, and the result with values. In
        both products, the heads belong to the class `root`.

        Returns:
          The weights from whose products the operands are computed; empty if no
          product of two activations has a dimension of the class.
        """
        weights: set[int] = set()
        for op in self.ops:
            activations = [t for t in op.inputs if self.is_activation[t]]
            if (
                op.kind == "product"
                and len(activations) > 1
                and any(
                    self.class_of(t, d) == root
                    for t in activations
                    for d in range(len(self.tensors[t].shape))
                )
            ):
                for tensor in activations:
                    weights |= self._sources[tensor]
        return weights

    def rows_and_columns(
        self, root: Dim
    ) -> Iterator[tuple[int, int, Use, bool]]:
        """Yields the products that use a weight with a dimension in a class.

        Yields:
          The weight, the dimension, the use, and whether the operation sums
          over the dimension.
        """
        for weight, dim in sorted(self.members.get(root, ())):
            for use in self.uses[weight]:
                if dim in use.contracted or dim in use.dims:
                    yield weight, dim, use, dim in use.contracted

    def _find_cyclic(self) -> set[Dim]:
        """Returns the classes that residual connections use.

        Such a class is contracted with a weight, and a later product that
        depends on the result has a dimension of the same class.
        """
        masks = [0] * len(self.tensors)
        before: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            mask = 0
            for tensor in op.inputs:
                mask |= masks[tensor]
            before[number] = mask
            if op.flops:
                mask |= 1 << number
            for tensor in op.outputs:
                masks[tensor] |= mask
        cyclic: set[Dim] = set()
        for root in self.members:
            weights = [weight for weight, _ in self.members[root]]
            # Only the first use of a weight counts, because layers with shared
            # weights follow each other.
            first = [
                (use, is_row)
                for weight, _, use, is_row in self.rows_and_columns(root)
                if self.ops[use.op].kind != "lookup"
                and use.op == self._first_product(weight)
            ]
            rows = sum({1 << use.op for use, is_row in first if is_row})
            if len(set(weights)) < len(weights) or any(
                before[use.op] & rows for use, is_row in first if not is_row
            ):
                cyclic.add(root)
        return cyclic

    def _first_product(self, weight: int) -> int | None:
        return next(
            (
                use.op
                for use in self.uses[weight]
                if self.ops[use.op].kind != "lookup"
            ),
            None,
        )

    def is_cyclic(self, root: Dim) -> bool:
        """Returns whether a class belongs to residual connections."""
        return root in self._cyclic

    def is_divisible(self, root: Dim, parts: int) -> bool:
        """Returns whether `parts` divides all dimensions of a class."""
        return not any(size % parts for size in self.sizes.get(root, ()))


def is_view(graph: StepGraph, op: Op) -> bool:
    """Returns whether an operation only casts, reshapes or transposes."""
    return (
        op.kind == "other"
        and not op.flops
        and len(op.inputs) >= 1
        and bool(op.same)
        and math.prod(graph.tensors[op.outputs[0]].shape)
        == math.prod(graph.tensors[op.inputs[op.same[0][0][0]]].shape)
    )
