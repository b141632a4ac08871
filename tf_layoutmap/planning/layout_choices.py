"""The layouts among which the planner selects for the weights of a model.

`groups_of` divides the weights into groups whose layouts depend on each other,
such as the projections of an attention layer, and lists the layouts of each
group. The module uses shapes and the operations that use each weight. It does
not use names or TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from tf_layoutmap.planning.problem import Axes
from tf_layoutmap.planning.step_graph import Dim, StepGraph, Use

# Axes that a group of weights does not support, with the reason.
Check = Callable[[int, Axes], str | None]


@dataclasses.dataclass(frozen=True)
class Option:
    """Layouts of the weights of a group.

    Attributes:
      name: Short name, such as `"heads over model"`.
      sentence: Continuation of "The planner stores the weights ...".
      axes: Mesh axes of each weight.
      shared: Class of dimensions that is sharded from weight to weight; None
        if the result of each weight is gathered or summed.
      gathers: Whether a step gathers weights of this option.
      refused: Reason why the layouts are not supported, or None.
    """

    name: str
    sentence: str
    axes: Mapping[int, Axes]
    shared: Dim | None = None
    gathers: bool = False
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights whose layouts depend on each other.

    Attributes:
      kind: `"embedding"`, `"attention"`, `"mlp"`, `"experts"`,
        `"convolution"`, `"recurrent"`, `"matrix"` or `"vector"`.
      weights: Indices of the weights.
      options: The layouts; the first one replicates all weights.
    """

    kind: str
    weights: tuple[int, ...]
    options: tuple[Option, ...]


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The axes of a mesh.

    Attributes:
      sizes: Size of each axis.
      batch: Axis that shards batches, or None.
    """

    sizes: Mapping[str, int]
    batch: str | None

    @property
    def model(self) -> list[str]:
        """The axes that do not shard batches and have several devices."""
        return [
            axis
            for axis, size in self.sizes.items()
            if axis != self.batch and size > 1
        ]

    @property
    def batch_parts(self) -> int:
        return 1 if self.batch is None else self.sizes[self.batch]


class Grouping:
    """Divides the weights of a graph into groups."""

    def __init__(
        self,
        graph: StepGraph,
        shapes: Sequence[tuple[int, ...]],
        mesh: MeshAxes,
        check: Check,
        recurrent: frozenset[int] = frozenset(),
        fixed: frozenset[int] = frozenset(),
    ):
        """Initializes the object.

        Args:
          graph: The operations of the model.
          shapes: Shape of each weight.
          mesh: Axes of the mesh.
          check: Function that returns why a weight does not support axes.
          recurrent: Weights that are gathered for each call of their layer.
          fixed: Weights that are replicated.
        """
        self._graph, self._shapes, self._mesh = graph, shapes, mesh
        self._check, self._recurrent, self._fixed = check, recurrent, fixed
        self._free = set(range(len(shapes)))
        self._biases: dict[int, list[int]] = {}
        for bias, kernel in sorted(graph.added_to.items()):
            if bias != kernel and not graph.uses[bias]:
                self._biases.setdefault(kernel, []).append(bias)

    def groups(self) -> list[Group]:
        """Returns the groups, in the order in which a step uses them."""
        graph = self._graph
        groups: list[Group] = []
        last = len(graph.ops)

        def first_use(weight: int) -> tuple[int, int]:
            ops = [use.op for use in graph.uses[weight]]
            return min([*ops, *graph.other_uses[weight]], default=last), weight

        order = sorted(range(len(self._shapes)), key=first_use)
        for weight in order:
            if weight not in self._free or weight in self._fixed:
                continue
            if len(self._shapes[weight]) < 2:
                continue
            groups.append(self._group(weight))
        for weight in order:
            if weight in self._free:
                self._free.discard(weight)
                axes: Axes = (None,) * len(self._shapes[weight])
                groups.append(
                    Group("vector", (weight,), (_replicated({weight: axes}),))
                )
        place = {w: i for i, w in enumerate(order)}
        return sorted(groups, key=lambda g: min(place[w] for w in g.weights))

    def _group(self, weight: int) -> Group:
        uses = self._graph.uses[weight]
        kinds = {self._graph.ops[use.op].kind for use in uses}
        if "lookup" in kinds:
            return self._alone(weight, "embedding")
        if weight in self._recurrent:
            return self._alone(weight, "recurrent")
        if "convolution" in kinds:
            return self._alone(weight, "convolution")
        if "product" not in kinds:
            return self._alone(weight, "matrix")
        roots = [
            root
            for d in sorted(uses[0].dims, key=uses[0].dims.__getitem__)
            for root in [self._graph.class_of_weight(weight, d)]
            if self._shapes[weight][d] > 1 and not self._graph.is_cyclic(root)
        ]
        members = [weight]
        for root in roots:
            connected = [
                *(w for w, _, _, _ in self._graph.rows_and_columns(root)),
                *sorted(self._graph.scores(root)),
            ]
            for other in connected:
                if (
                    other in self._free
                    and other not in members
                    and other not in self._fixed
                    and other not in self._recurrent
                    and len(self._shapes[other]) > 1
                    and self._is_product(other)
                ):
                    members.append(other)
        if len(members) == 1:
            return self._alone(weight, "matrix")
        return self._joint(sorted(members), roots)

    def _is_product(self, weight: int) -> bool:
        return {
            self._graph.ops[use.op].kind for use in self._graph.uses[weight]
        } == {"product"}

    def _joint(self, members: list[int], roots: list[Dim]) -> Group:
        """Returns a group whose weights share a class of dimensions."""
        graph = self._graph
        biases = [b for w in members for b in self._take(w)]
        kind = "mlp"
        if any(graph.scores(root) for root in roots):
            kind = "attention"
            # The other classes are dimensions of one head.
            roots = roots[:1]
        options = [self._replicate([*members, *biases])]
        for axis in self._mesh.model:
            for root in roots:
                name, sentence = self._described(root, kind, members)
                axes = self._axes_of_class(members, root, axis)
                self._add_biases(axes, biases)
                refused = self._divides(root, axis) or self._refused(axes)
                options.append(
                    Option(
                        f"{name} over {axis}",
                        f"with {sentence} over the axis {axis!r}",
                        axes,
                        root,
                        refused=refused,
                    )
                )
            for name, which in (("rows", 0), ("columns", 1)):
                axes = {
                    w: self._one_dim(w, self._dims_of(w)[which], axis)
                    for w in members
                }
                self._add_biases(axes, biases)
                options.append(
                    Option(
                        f"{name} of each matrix over {axis}",
                        f"with the {name} of each matrix over the axis "
                        f"{axis!r}",
                        axes,
                        refused=self._refused(axes),
                    )
                )
        if any("experts" in option.name for option in options):
            kind = "experts"
        return self._finished(kind, [*members, *biases], options)

    def _described(
        self, root: Dim, kind: str, members: Sequence[int]
    ) -> tuple[str, str]:
        uses = [
            (w, dim, use, is_row)
            for w, dim, use, is_row in self._graph.rows_and_columns(root)
            if w in members
        ]
        if kind == "attention":
            is_first = all(
                min(use.dims, key=use.dims.__getitem__, default=dim) <= dim
                for _, dim, use, is_row in uses
                if not is_row
            )
            return (
                ("heads", "its heads")
                if is_first
                else (
                    "columns",
                    "its columns",
                )
            )
        if not any(is_row for _, _, _, is_row in uses) and any(
            len(self._shapes[w]) > 2 for w, _, _, _ in uses
        ):
            return "experts", "its experts"
        if any(is_row for _, _, _, is_row in uses):
            return (
                "columns then rows",
                "the columns of the first matrix and the rows of the second "
                "matrix",
            )
        return "columns", "its columns"

    def _axes_of_class(
        self, members: Sequence[int], root: Dim, axis: str
    ) -> dict[int, Axes]:
        """Returns the axes if all dimensions of a class are sharded.

        Weights without such a dimension are sharded by the first dimension of
        their result, for example the keys of grouped queries.
        """
        graph, parts = self._graph, self._mesh.sizes[axis]
        axes_of: dict[int, Axes] = {}
        for weight in members:
            rank = len(self._shapes[weight])
            dims = [
                d
                for d in range(rank)
                if graph.class_of_weight(weight, d) == root
            ]
            if not dims:
                first = _first_dim(graph, weight)
                dims = [
                    d
                    for d in (first,)
                    if d is not None
                    and self._shapes[weight][d] > 1
                    and not graph.is_cyclic(graph.class_of_weight(weight, d))
                    and graph.is_divisible(
                        graph.class_of_weight(weight, d), parts
                    )
                ]
            axes_of[weight] = tuple(
                axis if dims and d == dims[0] else None for d in range(rank)
            )
        return axes_of

    def _alone(self, weight: int, kind: str) -> Group:
        """Returns a group of one kernel, its bias, and their layouts."""
        self._free.discard(weight)
        biases = self._take(weight) if kind != "embedding" else []
        options = [self._replicate([weight, *biases])]
        dims = self._dims_of(weight)
        names = _NAMES.get(kind, ("rows", "columns"))
        rows, columns = dims
        order = [(names[0], rows), (names[1], columns)]
        if kind in ("matrix", "convolution"):
            order.reverse()
        others = [
            d
            for d in range(len(self._shapes[weight]))
            if d not in (rows, columns)
        ]
        if kind == "matrix":
            order += [(f"dimension {d}", d) for d in others]
        axes_to_use = self._mesh.model
        if not axes_to_use and kind == "embedding" and self._mesh.batch:
            axes_to_use = [self._mesh.batch]
        for axis in axes_to_use:
            for name, dim in dict(order).items():
                if self._shapes[weight][dim] == 1:
                    continue
                axes = {weight: self._one_dim(weight, dim, axis)}
                self._add_biases(axes, biases)
                options.append(
                    Option(
                        f"{name} over {axis}",
                        f"with its {name} over the axis {axis!r}",
                        axes,
                        gathers=kind == "recurrent"
                        or not self._graph.uses[weight],
                        refused=self._refused(axes),
                    )
                )
        return self._finished(kind, [weight, *biases], options)

    def _dims_of(self, weight: int) -> tuple[int, int]:
        """Returns the first dimension of the rows and of the columns.

        Rows are the dimensions that a product sums, or that a lookup selects.
        Columns are the dimensions of the result.
        """
        rank = len(self._shapes[weight])
        uses: list[Use] = self._graph.uses[weight]
        if not uses:
            return 0, rank - 1
        use = uses[0]
        columns = sorted(use.dims, key=use.dims.__getitem__)
        rows = [d for d in use.contracted if d not in columns]
        others = [d for d in range(rank) if d not in (*rows, *columns)]
        if self._graph.ops[use.op].kind == "convolution" and not rows:
            # A depthwise convolution only has channels.
            return columns[0], columns[0]
        rows = rows or others or columns
        return rows[0], (columns or others or rows)[0]

    def _one_dim(self, weight: int, dim: int, axis: str) -> Axes:
        return tuple(
            axis if d == dim else None for d in range(len(self._shapes[weight]))
        )

    def _add_biases(self, axes: dict[int, Axes], biases: Sequence[int]) -> None:
        """Adds the axes of biases, which follow the columns of their kernel."""
        graph = self._graph
        for bias in biases:
            kernel = graph.added_to[bias]
            use = graph.uses[kernel][0]
            kernel_axes = axes[kernel]
            by_class = {
                graph.class_of_weight(kernel, d): kernel_axes[d]
                for d in use.dims
                if kernel_axes[d] is not None
            }
            if graph.ops[use.op].kind == "convolution":
                columns = [kernel_axes[d] for d in use.dims]
                axes[bias] = (
                    *[None] * (len(self._shapes[bias]) - 1),
                    *columns[:1],
                )
                continue
            axes[bias] = tuple(
                by_class.get(graph.class_of_weight(bias, d))
                if self._shapes[bias][d] > 1
                else None
                for d in range(len(self._shapes[bias]))
            )

    def _take(self, weight: int) -> list[int]:
        """Returns the biases of a weight that belong to no group yet."""
        self._free.discard(weight)
        biases = [
            b
            for b in self._biases.get(weight, [])
            if b in self._free and b not in self._fixed
        ]
        self._free.difference_update(biases)
        return biases

    def _replicate(self, weights: Sequence[int]) -> Option:
        axes: dict[int, Axes] = {
            w: (None,) * len(self._shapes[w]) for w in weights
        }
        return dataclasses.replace(
            _replicated(axes), refused=self._problem(axes)
        )

    def _divides(self, root: Dim, axis: str) -> str | None:
        parts = self._mesh.sizes[axis]
        sizes = sorted(self._graph.sizes.get(root, ()))
        bad = [size for size in sizes if size % parts]
        if not bad:
            return None
        return (
            f"the axis {axis!r} of size {parts} does not divide {bad[0]}, the "
            "size of this dimension"
            + (
                " in an operation that uses the weights"
                if len(sizes) > 1
                else ""
            )
        )

    def _refused(self, axes: Mapping[int, Axes]) -> str | None:
        if not any(any(weight_axes) for weight_axes in axes.values()):
            return "no weight has such a dimension"
        return self._problem(axes)

    def _problem(self, axes: Mapping[int, Axes]) -> str | None:
        reasons = (
            self._check(weight, weight_axes)
            for weight, weight_axes in axes.items()
        )
        return next((reason for reason in reasons if reason is not None), None)

    def _finished(
        self, kind: str, weights: Sequence[int], options: list[Option]
    ) -> Group:
        """Adds the layouts that also use the batch axis."""
        batch = self._mesh.batch
        if batch is not None and self._mesh.batch_parts > 1:
            for option in list(options):
                if option.refused is not None:
                    continue
                axes = self._along_batch(option.axes, batch)
                if axes is None or any(
                    self._check(w, a) is not None for w, a in axes.items()
                ):
                    continue
                is_first = option is options[0]
                options.append(
                    Option(
                        f"gathered along {batch}"
                        if is_first
                        else f"{option.name} and {batch}",
                        (
                            "sharded"
                            if is_first
                            else f"{option.sentence}, and sharded"
                        )
                        + f" along the axis of the batch, {batch!r}, along "
                        "which each step gathers it",
                        axes,
                        option.shared,
                        gathers=True,
                    )
                )
        unique: dict[tuple[object, ...], Option] = {}
        for option in options:
            key = tuple(sorted(option.axes.items())), option.shared is None
            unique.setdefault(key, option)
        return Group(kind, tuple(weights), _with_unique_names(unique.values()))

    def _along_batch(
        self, axes: Mapping[int, Axes], batch: str
    ) -> dict[int, Axes] | None:
        """Returns axes with an additional dimension along the batch axis."""
        along_batch, parts = dict(axes), self._mesh.batch_parts
        for weight, weight_axes in axes.items():
            if batch in weight_axes or len(weight_axes) < 2:
                continue
            dims = [
                d
                for d, size in enumerate(self._shapes[weight])
                if weight_axes[d] is None and size % parts == 0
            ]
            if self._is_embedding(weight):
                dims.reverse()
            for dim in dims:
                new = (*weight_axes[:dim], batch, *weight_axes[dim + 1 :])
                if self._check(weight, new) is None:
                    along_batch[weight] = new
                    break
        return None if along_batch == dict(axes) else along_batch

    def _is_embedding(self, weight: int) -> bool:
        return any(
            self._graph.ops[use.op].kind == "lookup"
            for use in self._graph.uses[weight]
        )


def _with_unique_names(options: Iterable[Option]) -> tuple[Option, ...]:
    unique: dict[str, Option] = {}
    for option in options:
        name, number = option.name, 2
        while name in unique:
            name, number = f"{option.name} ({number})", number + 1
        unique[name] = dataclasses.replace(option, name=name)
    return tuple(unique.values())


_NAMES = {"convolution": ("input channels", "output channels")}


def _first_dim(graph: StepGraph, weight: int) -> int | None:
    use = graph.uses[weight][0]
    return min(use.dims, key=use.dims.__getitem__, default=None)


def _replicated(axes: Mapping[int, Axes]) -> Option:
    return Option("replicate", "on every device in full", axes)
