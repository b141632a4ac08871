"""Limits restarts of a program without progress."""

from __future__ import annotations

from collections.abc import MutableMapping

# Values of the option `on_server_loss`.
ON_SERVER_LOSS = ("raise", "restart")

# Environment variable that survives `os.execv`: checkpoint and restart count.
_VARIABLE = "TF_LAYOUTMAP_RESTARTS"
_MAX_RESTARTS = 3


def may_restart(num_saved: int, environment: MutableMapping[str, str]) -> bool:
    """Records a restart, and returns whether it is allowed.

    At most three restarts are allowed without a new checkpoint.

    >>> environment = {}
    >>> [may_restart(40, environment) for _ in range(4)]
    [True, True, True, False]
    >>> may_restart(80, environment)
    True

    Args:
      num_saved: Number of closures that the newest checkpoint holds.
      environment: `os.environ`.
    """
    where, _, count = environment.get(_VARIABLE, "").partition(":")
    before = int(count) if where == str(num_saved) else 0
    if before >= _MAX_RESTARTS:
        return False
    environment[_VARIABLE] = f"{num_saved}:{before + 1}"
    return True
