"""`Plan`: the result of `tlm.plan`, with explanations and files."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from tf_layoutmap import partition
from tf_layoutmap._core import checks
from tf_layoutmap.planning import explanations, page
from tf_layoutmap.planning.problem import Choice, Item, Problem, devices_of
from tf_layoutmap.planning.search import Solution

if TYPE_CHECKING:
    from rich.console import Console

    from tf_layoutmap._core.types import DTypeLike
    from tf_layoutmap.layout.layout_map import LayoutMap
    from tf_layoutmap.layout.mesh.device_mesh import AnyMesh

_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Target:
    """What a plan was made for.

    Attributes:
      kind: `"mesh"`, `"servers"`, `"workers"` or `"process"`.
      sizes: The size of each axis of a mesh, by name, in the order of the axes.
        For other kinds, the number of devices by the kind.
    """

    kind: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        if self.kind == "mesh":
            axes = ", ".join(
                f"{name!r}: {size}" for name, size in self.sizes.items()
            )
            return f"a mesh {{{axes}}}"
        count = self.sizes.get(self.kind, 1)
        if self.kind == "process":
            return "one process"
        return f"{count} {self.kind if count != 1 else self.kind[:-1]}"


class Plan(partition.PartitionerByName):
    """A choice of layouts or shards for each weight or table of a model.

    `tlm.plan` creates plans. A plan for tables can be passed as the argument
    `partitioner` of `tlm.TPUEmbedding`. A plan for a mesh has the method
    `layout_map`.

    Attributes:
      solution: The items, all of their choices, and the selected choices.
      target: What the plan was made for.
      notes: Sentences about the assumptions of the plan.
    """

    def __init__(
        self, solution: Solution, target: Target, notes: Iterable[str] = ()
    ):
        """Creates a plan from the result of a search."""
        self.solution = solution
        self.target = target
        self.notes = tuple(notes)

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step in seconds."""
        return self.solution.step_seconds

    @property
    def bytes_per_device(self) -> list[int]:
        """Predicted number of bytes on each device."""
        return list(self.solution.total_memory)

    @property
    def choices(self) -> dict[str, str]:
        """Name of the selected choice of each item, by item."""
        return dict(self.solution.selected)

    @property
    def over_processes(self) -> str:
        """Value for the argument `over_processes` of `tlm.TPUEmbedding`.

        The value is `"sharded"` or `"replicated"`.

        Raises:
          ValueError: If the plan was not made for `num_workers`.
        """
        self._check_kind("workers", "over_processes")
        item = self.solution.problem.items[0]
        is_replicated = self.choices[item.name].split(" ")[0] == "replicate"
        return "replicated" if is_replicated else "sharded"

    def layout_map(self, mesh: AnyMesh | None = None) -> LayoutMap:
        """Returns the `tlm.LayoutMap` of a plan for a mesh.

        Args:
          mesh: The mesh, or None to create a mesh of the first devices.

        Raises:
          ValueError: If the plan was made for another mesh, or for tables.
        """
        self._check_kind("mesh", "layout_map")
        from tf_layoutmap.planning import planned_map

        return planned_map.layout_map_of(self, mesh)

    def explain(self, name: str) -> str:
        """Explains the choice of an item.

        Args:
          name: Name of an item, or of one of its weights.

        Returns:
          Sentences with the choice, the other choices, their costs, and what
          would have to change for another choice to be better.

        Raises:
          ValueError: If the plan has no item with this name.
        """
        return " ".join(explanations.sentences(self.solution, self._item(name)))

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Raises ValueError if the plan was made for another mesh.

        Args:
          sizes: The size of each axis of the mesh that is used, by name.
        """
        if self.target.kind != "mesh" or dict(self.target.sizes) != dict(sizes):
            used = Target("mesh", sizes)
            raise ValueError(
                f"The plan was made for {self.target}, and is used with "
                f"{used}. Call tlm.plan with this mesh."
            )

    def check_servers(self, num_servers: int) -> None:
        """Raises ValueError if the plan was made for another cluster.

        Args:
          num_servers: Number of servers that are used; 0 for tables in one
            process.
        """
        kind = "servers" if num_servers else "process"
        if self.target.kind != kind or (
            num_servers and self.target.sizes[kind] != num_servers
        ):
            used = Target(kind, {kind: num_servers})
            argument = (
                f"num_servers={num_servers}" if num_servers else "no servers"
            )
            raise ValueError(
                f"The plan was made for {self.target}, and is used with {used}."
                f" Call tlm.plan with {argument}."
            )

    def __call__(
        self,
        shape: Iterable[SupportsIndex | None],
        dtype: DTypeLike,
        axis: int = 0,
        *,
        name: str | None = None,
    ) -> list[int]:
        """Returns the number of shards of a table along each axis.

        Args:
          shape: Shape of the table.
          dtype: Dtype of the table. The plan does not depend on the dtype.
          axis: Axis to shard; must be 0.
          name: Name of the table. If it is None, all tables of this shape must
            have the same number of shards.

        Raises:
          ValueError: If the plan was made for a mesh, has no table with this
            name and shape, or has several tables of this shape with different
            numbers of shards.
        """
        del dtype
        if self.target.kind not in ("servers", "process"):
            raise ValueError(
                "Argument `partitioner` must be a plan for tables of servers or"
                f" of one process. Received: a plan for {self.target}."
            )
        if axis != 0:
            raise ValueError(checks.message("axis", "0", axis))
        sizes = tuple(int(size) for size in shape if size is not None)
        items = (
            [self._item(name)]
            if name is not None
            else [
                item
                for item in self.solution.problem.items
                if sizes in item.weights.values()
            ]
        )
        if not items or sizes not in items[0].weights.values():
            planned = list(items[0].weights.values())[0] if items else None
            raise ValueError(
                "A table must have the shape for which the plan was made"
                + (f", {planned}" if planned else "")
                + f". Received: {sizes} (table {name!r})."
            )
        counts = {self.solution.choice_of(item).num_shards for item in items}
        if len(counts) > 1:
            raise ValueError(
                "A plan must get the name of a table if tables of one shape "
                f"have different numbers of shards, {sorted(counts)}: pass the "
                "plan as `partitioner` of tlm.TPUEmbedding. Received: a table "
                f"of shape {sizes} without a name."
            )
        return [counts.pop(), *[1] * (len(sizes) - 1)]

    def servers_of(self, name: str) -> list[int]:
        """Returns the index of the server of each shard of a table.

        Args:
          name: Name of the table.

        Raises:
          ValueError: If the plan was not made for servers, or has no table with
            this name.
        """
        self._check_kind("servers", "servers_of")
        choice = self.solution.choice_of(self._item(name))
        devices = devices_of(choice, self.solution.problem)
        return list(devices[: choice.num_shards])

    def print(self, console: Console | None = None) -> None:
        """Prints the devices and the choices as tables.

        Args:
          console: A `rich.console.Console`, or None for the terminal.
        """
        # `rich` is imported here, because only this method requires it.
        from rich import console as rich_console
        from rich import table as rich_table
        from rich import text

        from tf_layoutmap.embedding.inspection import html_report

        console = console or rich_console.Console()
        for title, rows in (
            (page.title(self), page.device_rows(self)),
            ("Choices", page.choice_rows(self)),
        ):
            parts = html_report.split_columns(rows, console.width)
            for part in parts:
                shown = rich_table.Table(
                    title=text.Text(
                        title if part is parts[0] else f"{title}, continued"
                    )
                )
                for number, name in enumerate(part[0]):
                    shown.add_column(
                        name,
                        justify="right" if number else "left",
                        overflow="fold",
                    )
                for row in part[1:]:
                    shown.add_row(*map(text.Text, row))
                console.print(shown)
        for note in self.notes:
            console.print(text.Text(note))

    def __str__(self) -> str:
        from tf_layoutmap.embedding.inspection import html_report

        lines = [page.title(self)]
        for rows in (page.device_rows(self), page.choice_rows(self)):
            for part in html_report.split_columns(rows, 80):
                widths = [max(map(len, column)) for column in zip(*part)]
                lines.append("")
                lines += [
                    "  ".join(
                        cell.ljust(width) for cell, width in zip(row, widths)
                    ).rstrip()
                    for row in part
                ]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])

    def html(self) -> str:
        """Returns an HTML page that shows the devices and the choices."""
        return page.page(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the HTML page to a file.

        Args:
          path: Path of the file. An existing file is replaced.

        Raises:
          OSError: If the file cannot be written. After this error, an existing
            file is unchanged.
        """
        from tf_layoutmap._core import files

        files.write_text(path, self.html())

    def to_dict(self) -> dict[str, object]:
        """Returns the plan as a dict that JSON can represent."""
        problem = self.solution.problem
        return {
            "version": _VERSION,
            "target": {"kind": self.target.kind, **self.target.sizes}
            if self.target.kind != "mesh"
            else {
                "kind": "mesh",
                "axes": [list(axis) for axis in self.target.sizes.items()],
            },
            "step_seconds": self.step_seconds,
            "devices": [
                {"name": name, "budget": budget, "memory": memory, "time": time}
                for name, budget, memory, time in zip(
                    problem.devices,
                    problem.budgets,
                    self.solution.memory(),
                    self.solution.seconds(),
                )
            ],
            "fixed_memory": dict(problem.fixed_memory),
            "fixed_seconds": dict(problem.fixed_seconds),
            "shared_costs": {
                name: dict(parts)
                for name, parts in problem.shared_costs.items()
            },
            "use_seconds": dict(problem.use_seconds),
            "sum_share": problem.sum_share,
            "is_limited": problem.is_limited,
            "items": [
                {
                    **{
                        field.name: getattr(item, field.name)
                        for field in dataclasses.fields(item)
                        if field.name not in ("choices", "weights")
                    },
                    "weights": {
                        name: list(shape)
                        for name, shape in item.weights.items()
                    },
                    "selected": self.solution.selected[item.name],
                    "choices": [
                        _choice_dict(choice) for choice in item.choices
                    ],
                }
                for item in problem.items
            ],
            "pins": dict(self.solution.pins),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Plan:
        """Returns the plan of a dict that `to_dict` returned.

        Args:
          values: The dict, possibly read from JSON.

        Raises:
          ValueError: If the dict was not written by this version of the class.
        """
        if values.get("version") != _VERSION:
            raise ValueError(
                f"The dict of a plan must have version {_VERSION}. Received: "
                f"{values.get('version')!r}."
            )
        return cls._read(cast("Mapping[str, Any]", values))

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> Plan:
        target = dict(values["target"])
        kind = target.pop("kind")
        items = tuple(
            Item(
                name=item["name"],
                kind=item["kind"],
                weights={
                    name: tuple(shape)
                    for name, shape in item["weights"].items()
                },
                choices=tuple(map(_choice_of, item["choices"])),
                keys=dict(item["keys"]),
                quantity=item["quantity"],
                amount=item["amount"],
            )
            for item in values["items"]
        )
        problem = Problem(
            tuple(device["name"] for device in values["devices"]),
            tuple(device["budget"] for device in values["devices"]),
            items,
            dict(values["fixed_memory"]),
            dict(values["fixed_seconds"]),
            values["shared_costs"],
            dict(values["use_seconds"]),
            values["sum_share"],
            values.get("is_limited", True),
        )
        return cls(
            Solution(
                problem,
                {item["name"]: item["selected"] for item in values["items"]},
                dict(values["pins"]),
            ),
            Target(kind, dict(target.get("axes", target.items()))),
            values["notes"],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        problem = self.solution.problem
        most = max(self.bytes_per_device)
        return (
            f"<Plan of {len(problem.items)} items for {self.target}: at most "
            f"{explanations.format_bytes(most)} per device, "
            f"{explanations.format_time(self.step_seconds)} per step>"
        )

    def _item(self, name: str) -> Item:
        for item in self.solution.problem.items:
            if name == item.name:
                return item
        for item in self.solution.problem.items:
            if name in item.weights or name in item.keys.values():
                return item
        for item in self.solution.problem.items:
            # The layer of a weight.
            if any(name == w.rpartition(".")[0] for w in item.weights):
                return item
        inside = [
            item
            for item in self.solution.problem.items
            if item.kind != "vector"
            and any(w.startswith(f"{name}.") for w in item.weights)
        ]
        if len(inside) == 1:
            return inside[0]
        names = [item.name for item in inside or self.solution.problem.items]
        near = difflib.get_close_matches(str(name), names, 3) or names[:3]
        raise ValueError(
            f"Argument `name` must be the name of an item of the plan, such as "
            f"{near}. Received: {name!r}."
        )

    def _check_kind(self, kind: str, member: str) -> None:
        if self.target.kind != kind:
            target, argument = (
                ("a mesh", "mesh") if kind == "mesh" else (kind, f"num_{kind}")
            )
            raise ValueError(
                f"`{member}` requires a plan for {target}: call tlm.plan with "
                f"the argument `{argument}`. Received: a plan for "
                f"{self.target}."
            )


def _choice_dict(choice: Choice) -> dict[str, Any]:
    values = {
        field.name: getattr(choice, field.name)
        for field in dataclasses.fields(choice)
        if getattr(choice, field.name) != field.default
    }
    values["memory"] = dict(choice.memory)
    values["seconds"] = dict(choice.seconds)
    values["layouts"] = {
        name: list(axes) for name, axes in choice.layouts.items()
    }
    values["causes"] = list(choice.causes)
    values["seconds_if"] = {
        name: dict(parts) for name, parts in choice.seconds_if.items()
    }
    if choice.devices is not None:
        values["devices"] = list(choice.devices)
    return values


def _choice_of(values: Mapping[str, Any]) -> Choice:
    read = dict(values)
    read["layouts"] = {
        name: tuple(axes) for name, axes in values["layouts"].items()
    }
    read["causes"] = tuple(values["causes"])
    if "devices" in values:
        read["devices"] = tuple(values["devices"])
    return Choice(**read)
