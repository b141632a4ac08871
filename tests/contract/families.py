"""Families of random programs, which `random_programs` draws."""

import dataclasses

_CALLS = (
    *("forward", "evict", "delta", "resize", "write", "read", "checkpoint"),
    *("convert", "export", "delta", "expire"),
)


@dataclasses.dataclass(frozen=True)
class Family:
    """Random programs that the same runtimes support.

    Attributes:
      runtimes: Runtimes that must have the same results. The first runtime is
        the reference.
      calls: Names of the calls between training steps.
      has_exact_sums: Whether all sums of gradients are exact. Several replicas
        add gradients in another order than one replica.
      is_pipelined: Whether some programs use pipelining.
    """

    runtimes: tuple[str, ...]
    calls: tuple[str, ...]
    has_exact_sums: bool = False
    is_pipelined: bool = False


FAMILIES = {
    "steps": Family(
        (
            *("host", "local_servers", "mirrored"),
            *("replicated", "sharded", "servers"),
        ),
        _CALLS,
        has_exact_sums=True,
    ),
    # Steps with several lookups by one replica, as in a layer.
    "lookups": Family(
        ("host", "local_servers"),
        ("lookups", "two_steps", "abandon", *_CALLS),
    ),
    # In a layer, the calls of the replicas are separate steps of a vocabulary,
    # so that the results differ from the host.
    "replicas": Family(
        ("mirrored", "replicated", "sharded"),
        ("lookup", "flush", "abandon", *_CALLS),
        is_pipelined=True,
    ),
}
