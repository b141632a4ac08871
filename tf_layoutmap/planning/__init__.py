"""The planner: chooses layouts and shards from memory budgets and costs.

Start with `tlm.plan`, which returns a `Plan`. An `IdReport`, which
`tlm.inspect_ids` returns, describes the ids of its tables, and computes a
`SparseCoreLimits` for some `SparseCores`. `MachineCosts` contains the costs of a
machine. `convert_checkpoint` converts tables between the layouts of devices.

`planner.py` defines `tlm.plan`. `problem.py` defines the input of the search,
which `tables.py` creates from feature configs and `keras_models.py` creates
from Keras models. `search.py` selects the choices, and `plan.py` presents the
result. `probe.py` measures the costs of the machine.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "IdReport": "tf_layoutmap.embedding.inspection.inspect_ids:IdReport",
    "MachineCosts": "tf_layoutmap.planning.costs:MachineCosts",
    "Plan": "tf_layoutmap.planning.plan:Plan",
    "SparseCoreLimits": "tf_layoutmap.embedding.inspection.sparse_core_limits:SparseCoreLimits",
    "SparseCores": "tf_layoutmap.embedding.inspection.sparse_core_limits:SparseCores",
    "convert_checkpoint": "tf_layoutmap.embedding.checkpoints.conversion:convert_checkpoint",
}

if TYPE_CHECKING:
    from tf_layoutmap.embedding.checkpoints.conversion import convert_checkpoint
    from tf_layoutmap.embedding.inspection.inspect_ids import IdReport
    from tf_layoutmap.embedding.inspection.sparse_core_limits import (
        SparseCoreLimits,
        SparseCores,
    )
    from tf_layoutmap.planning.costs import MachineCosts
    from tf_layoutmap.planning.plan import Plan
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "IdReport",
    "MachineCosts",
    "Plan",
    "SparseCoreLimits",
    "SparseCores",
    "convert_checkpoint",
]
