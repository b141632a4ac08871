"""Resizing of vocabularies whose tables are on servers.

The coordinator resizes a table while no step runs: it creates new variables,
copies the rows, and creates new resources on the servers. Steps that were
traced before the resize use the old resources, and raise errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.host import resizing
from tf_layoutmap.embedding.servers import step_ops
from tf_layoutmap.embedding.servers import tables as server_tables


@contextlib.contextmanager
def retired(servers: Sequence[step_ops.Server]) -> Iterator[None]:
    """Lets ops with the handles of servers fail, from now on.

    If the block raises an error, the ops succeed again.
    """

    def set_retired(is_retired: bool) -> None:
        for server in servers:
            with tf.device(server.device):
                ops.retire_server(server=server.handle, retired=is_retired)

    set_retired(True)
    try:
        yield
    except BaseException:
        set_retired(False)
        raise


def resize(
    spec: config.EmbeddingSpec,
    table: int,
    old: Mapping[str, Mapping[str, Any]],
    on_servers: server_tables.ServerTables,
) -> tuple[resizing.Resized, dict[int, list[str]]]:
    """Creates variables for tables with a new capacity, and copies the rows.

    The memory of the coordinator must hold the keys and a copy of one variable
    at a time. The memory of the servers must hold the old and the new tables.

    Args:
      spec: Spec with the new capacity.
      table: Index of a table. All tables with the same vocabulary are resized.
      old: Old variables by name, by the name of the table.
      on_servers: Creator of the tables.

    Returns:
      A tuple of the resized tables, and the devices of the new shards by index
      of the table.
    """
    sharing = open_specs.sharing(spec, table)

    def create(spec: config.EmbeddingSpec, number: int) -> dict[str, Any]:
        return variables[spec.tables[number].name]

    with resizing.resize_scope(old[spec.tables[table].name]):
        variables, devices = on_servers.create(
            open_specs.spec_of_sharing(spec, table)
        )
        resized = resizing.resize(spec, table, old, create=create)
    return resized, dict(zip(sharing, devices, strict=True))


def empty_variables(old: Mapping[str, Any]) -> None:
    """Frees the memory of variables that a resize has replaced."""
    for variable in old.values():
        resizing.empty_shards(
            getattr(variable, "copies", None) or tables.shards_of(variable)
        )
