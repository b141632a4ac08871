"""Training on parameter servers, with `tlm.ps.Run` or `model.fit`."""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "Datasets": "tf_layoutmap.ps.datasets:Datasets",
    "connect": "tf_layoutmap.ps.connection:connect",
    "Run": "tf_layoutmap.ps.run:Run",
    "ServerLostError": "tf_layoutmap.ps.waiting:ServerLostError",
    "StepDeadlineError": "tf_layoutmap.ps.waiting:StepDeadlineError",
}

if TYPE_CHECKING:
    from tf_layoutmap.ps.connection import connect
    from tf_layoutmap.ps.datasets import Datasets
    from tf_layoutmap.ps.run import Run
    from tf_layoutmap.ps.waiting import ServerLostError, StepDeadlineError
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "Datasets",
    "connect",
    "Run",
    "ServerLostError",
    "StepDeadlineError",
]
