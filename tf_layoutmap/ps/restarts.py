"""Limits how often a program restarts without progress."""

from __future__ import annotations

from collections.abc import MutableMapping

# Values of the option `on_server_loss`.
ON_SERVER_LOSS = ("raise", "restart")

# Environment variable for the checkpoint and the restart count. A process keeps
# its environment when it calls `os.execv`.
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
      num_saved: Number of closures whose updates are in the newest checkpoint.
      environment: `os.environ`.
    """
    where, _, count = environment.get(_VARIABLE, "").partition(":")
    before = int(count) if where == str(num_saved) else 0
    if before >= _MAX_RESTARTS:
        return False
    environment[_VARIABLE] = f"{num_saved}:{before + 1}"
    return True
