"""Logical CPUs of this process that act as servers, without a cluster."""

import contextlib
from unittest import mock

import tf_layoutmap as tlm
from tests import strategies
from tf_layoutmap.embedding import backend, table_store
from tf_layoutmap.embedding.servers import tables


@contextlib.contextmanager
def servers(num_servers: int, num_shards: int | None = None):
    """Makes embeddings in a `with` block use logical CPUs as servers."""
    assert num_servers <= strategies.NUM_DEVICES
    shards = tlm.partitioners.FixedShardsPartitioner(num_shards or num_servers)

    def init(self, strategy, partitioner):
        del strategy
        table_store.TableStore.__init__(self, partitioner or shards)
        self.devices = [f"/device:CPU:{one}" for one in range(num_servers)]
        self._placement = tables.Placement(num_servers)
        self._servers_of_table = {}

    with (
        mock.patch.object(backend, "choose_engine", lambda *_: "servers"),
        mock.patch.object(tables.ServerStore, "__init__", init),
    ):
        yield
