"""What the loss of a server means for `fit`: an error, or a new start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.ps import connection, guard
from tf_layoutmap.ps.datasets import Datasets

_REMEDY = (
    "Start missing servers and this program again; with a "
    "BackupAndRestore callback it goes on from its last epoch."
)


def raising(strategy: Any, data: Datasets) -> guard.Guard:
    """Returns what makes an error of a loss."""
    return guard.Guard(
        connection.processes_of(strategy) or [],
        data.deadline,
        lambda: (0, _REMEDY),
        restarts_program=False,
    )


def of_fit(
    strategy: Any, data: Datasets, backups: Sequence[Any]
) -> guard.Guard:
    """Returns what does of a loss in `fit` what `data` asks for.

    Args:
      strategy: The model's.
      data: What `fit` is given.
      backups: The BackupAndRestore callbacks that it is given.

    Raises:
      ValueError: The program is to start anew, and would not go on where it
        was: it has no backup, or no cluster of `connect`.
    """
    if data.on_server_loss == "raise":
        return raising(strategy, data)
    processes = connection.processes_of(strategy)
    if processes is None:
        raise ValueError(
            'Argument `on_server_loss` of tlm.ps.Datasets must be "raise" '
            "but under what `tlm.ps.connect` returned, which waits for "
            f'servers. Received: "restart" and {strategy!r}.'
        )
    if len(backups) != 1:
        raise ValueError(
            "Argument `callbacks` of `fit` must have one BackupAndRestore of "
            'the model\'s Keras with on_server_loss="restart" of '
            "tlm.ps.Datasets: the program goes on from what it has saved. "
            f"Received: {len(backups)}."
        )
    return guard.Guard(
        processes,
        data.deadline,
        lambda: (_last_change(os.fspath(backups[0].backup_dir)), _REMEDY),
        restarts_program=True,
    )


def _last_change(folder: str) -> int:
    """When a file below a folder was written last, in ns; 0 without any."""
    return max(
        (
            tf.io.gfile.stat(os.path.join(path, name)).mtime_nsec
            for path, _, names in tf.io.gfile.walk(folder)
            for name in names
        ),
        default=0,
    )
