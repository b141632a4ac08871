"""Summaries of the shards of a table, as objects that can be printed."""

from tf_layoutmap.partition import ShardSummary, TableSummary
from tf_layoutmap.sharded.routing.checks import Shards, known_sizes


def summarize(shards: Shards) -> TableSummary:
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
    return TableSummary(
        name=shards.name,
        shape=tuple(shards.sizes),
        dtype=shards.dtype.name,
        axis=shards.axis,
        placement=shards.partition.placement,
        shards=described,
    )
