"""Which shard of which table is on which server: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable


class Placement:
    """Puts each shard on the server that has the fewest bytes.

    >>> placement = Placement(2)
    >>> placement.place([30, 10, 10]), placement.place([20])
    ([0, 1, 1], [1])
    >>> placement.num_bytes
    [30, 40]

    Attributes:
      num_bytes: By server, what it has been given.
    """

    def __init__(self, num_servers: int):
        """Starts with empty servers.

        Args:
          num_servers: At least 1.
        """
        self.num_bytes = [0] * num_servers

    def place(self, num_bytes: Iterable[int]) -> list[int]:
        """Returns the server of each shard of one table.

        Args:
          num_bytes: Of each shard with its slot variables, in their order.
        """
        servers: list[int] = []
        for size in num_bytes:
            server = self.num_bytes.index(min(self.num_bytes))
            self.num_bytes[server] += size
            servers.append(server)
        return servers
