"""The planner: chooses layouts and shards from memory budgets and costs.

Start with `tlm.plan`, which returns a `Plan`. `MachineCosts` contains the costs
of a machine.

`planner.py` defines `tlm.plan`. `problem.py` defines the input of the search,
which `tables.py` creates from feature configs and `keras_models.py` creates
from Keras models. `search.py` selects the choices, and `plan.py` presents the
result. `probe.py` measures the costs of the machine.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "MachineCosts": "tf_layoutmap.planning.costs:MachineCosts",
    "Plan": "tf_layoutmap.planning.plan:Plan",
}

if TYPE_CHECKING:
    from tf_layoutmap.planning.costs import MachineCosts
    from tf_layoutmap.planning.plan import Plan
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "MachineCosts",
    "Plan",
]
