"""How often a program may start itself anew without getting on."""

from __future__ import annotations

from collections.abc import MutableMapping

# What becomes of a program when a server is lost.
ON_SERVER_LOSS = ("raise", "restart")

# Outlives `os.execv`: at which checkpoint, and how often.
_VARIABLE = "TF_LAYOUTMAP_RESTARTS"
_MOST = 3


def may_restart(num_saved: int, environment: MutableMapping[str, str]) -> bool:
    """Notes a restart; false where as many came without a new checkpoint.

    >>> environment = {}
    >>> [may_restart(40, environment) for _ in range(4)]
    [True, True, True, False]
    >>> may_restart(80, environment)
    True

    Args:
      num_saved: Closures that the newest checkpoint holds.
      environment: `os.environ`.
    """
    where, _, count = environment.get(_VARIABLE, "").partition(":")
    before = int(count) if where == str(num_saved) else 0
    if before >= _MOST:
        return False
    environment[_VARIABLE] = f"{num_saved}:{before + 1}"
    return True
