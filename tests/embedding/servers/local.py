"""Servers that are logical CPUs of this process: the ops, without a cluster."""

import contextlib
from unittest import mock

import tf_layoutmap as tlm
from tests import strategies
from tf_layoutmap.embedding.servers import placement
from tf_layoutmap.embedding.servers import tables as server_tables
from tf_layoutmap.embedding.step import engine_choice


@contextlib.contextmanager
def servers(num_servers: int, num_shards: int | None = None):
    """What is made under it is as under a ParameterServerStrategy."""
    assert num_servers <= strategies.NUM_DEVICES
    shards = tlm.partitioners.FixedShardsPartitioner(num_shards or num_servers)

    def init(self, strategy, partitioner):
        del strategy
        self.devices = [f"/device:CPU:{one}" for one in range(num_servers)]
        self.partitioner = partitioner or shards
        self._placement = placement.Placement(num_servers)

    with (
        mock.patch.object(engine_choice, "choose", lambda *_: "servers"),
        mock.patch.object(server_tables.ServerTables, "__init__", init),
    ):
        yield
