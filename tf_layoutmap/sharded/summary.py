"""What each shard of a table holds, as data and as a table to print."""

import dataclasses
import io

import rich.console
import rich.table

from tf_layoutmap.sharded.routing.checks import Shards, known_sizes


@dataclasses.dataclass(frozen=True)
class ShardSummary:
    """One shard.

    Attributes:
      name: Of its variable.
      shape: Of its variable.
      rows: Rows that it holds, or columns when the table is cut along axis 1.
      num_bytes: Size of its value; of strings only what TensorFlow counts.
      device: Where it is.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    num_bytes: int
    device: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """A table: `print` shows it, `rich.print` in colour.

    Attributes:
      name: Of the table.
      shape: Of the whole table.
      dtype: Name of its dtype.
      axis: The axis that is cut.
      placement: The rule of the partition.
      shards: One per shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int
    placement: str
    shards: tuple[ShardSummary, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
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
        out = io.StringIO()
        rich.console.Console(file=out, width=120).print(self)
        return out.getvalue()


def summarize(shards: Shards) -> Summary:
    """Describes a table without reading it."""
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
