"""Summaries of the shards of a table, as objects that can be printed."""

import dataclasses

import rich.table

from tf_layoutmap._core import user_warnings
from tf_layoutmap.sharded.routing.checks import Shards, known_sizes


@dataclasses.dataclass(frozen=True)
class ShardSummary:
    """Summary of one shard.

    Attributes:
      name: Name of the shard's variable.
      shape: Shape of the shard's variable.
      rows: Number of rows, or of columns if the table is sharded along axis 1.
      num_bytes: Size of the value in bytes. For a string variable, the
        computation uses the size that TensorFlow reports for the string dtype.
      device: Device of the variable.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    num_bytes: int
    device: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summary of a table.

    The summary can be printed with `print`, and in color with `rich.print`.

    Attributes:
      name: Name of the table.
      shape: Shape of the full table.
      dtype: Name of the table's dtype.
      axis: The axis that is sharded.
      placement: Placement of the partition.
      shards: One `ShardSummary` per shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int
    placement: str
    shards: tuple[ShardSummary, ...]

    @property
    def num_bytes(self) -> int:
        """Total size of all shards in bytes."""
        return sum(shard.num_bytes for shard in self.shards)

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(
            title=f"{self.name}: {self.dtype} {list(self.shape)}, "
            f"{self.placement} along axis {self.axis}",
            show_footer=True,
        )
        table.add_column("shard", "total")
        table.add_column(
            "columns" if self.axis == 1 else "rows",
            f"{sum(shard.rows for shard in self.shards):,}",
            justify="right",
        )
        table.add_column("bytes", f"{self.num_bytes:,}", justify="right")
        table.add_column("device")
        for shard in self.shards:
            table.add_row(
                shard.name,
                f"{shard.rows:,}",
                f"{shard.num_bytes:,}",
                shard.device,
            )
        return table

    def __str__(self) -> str:
        return user_warnings.printed(self, width=120)


def summarize(shards: Shards) -> Summary:
    """Returns the summary of a table without reading its values."""
    described = tuple(
        ShardSummary(
            name=variable.name,
            shape=tuple(known_sizes(variable)),
            rows=size,
            num_bytes=variable.shape.num_elements() * shards.dtype.size,
            device=device,
        )
        for variable, size, device in zip(
            shards.variables, shards.partition.sizes, shards.devices
        )
    )
    return Summary(
        name=shards.name,
        shape=tuple(shards.sizes),
        dtype=shards.dtype.name,
        axis=shards.axis,
        placement=shards.partition.placement,
        shards=described,
    )
