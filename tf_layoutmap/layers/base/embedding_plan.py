"""Plans which `Embedding` layers of a model are replaced.

An item is an `Embedding` layer. It remains a stock layer, whose steps read and
write the full table, or it is replaced, so that steps read and write only the
rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tf_layoutmap.planning import budgets, search
from tf_layoutmap.planning.plan import Plan, Target
from tf_layoutmap.planning.problem import Choice, Item, Problem
from tf_layoutmap.planning.search import Solution

if TYPE_CHECKING:
    from tf_layoutmap.layers.base.embedding_report import (
        EmbeddingEntry,
        EmbeddingReport,
    )

STOCK, SHARDED = "stock", "sharded"


def plan_replacement(
    report: EmbeddingReport, memory: Any, pins: Mapping[str, str] | None
) -> Plan:
    """Returns the fastest plan whose tables fit.

    Args:
      report: Report of a dry run.
      memory: Bytes for the tables and slot variables of all `Embedding` layers.
      pins: `"stock"` or `"sharded"`, by path of the layer.

    Raises:
      ValueError: If a pin is invalid, or if no plan fits.
    """
    problem = problem_of_report(report, budgets.read_budgets(memory, 1)[0])
    return _plan(search.solve(problem, pins), report)


def plan_of_report(report: EmbeddingReport) -> Plan:
    """Returns a plan with the choices that a report already contains."""
    problem = problem_of_report(
        report, max(report.bytes_before, report.bytes_after)
    )
    return _plan(
        Solution(
            problem,
            {
                item.name: SHARDED if entry.is_replaced else STOCK
                for item, entry in zip(problem.items, report.entries)
            },
        ),
        report,
    )


def _plan(solution: Solution, report: EmbeddingReport) -> Plan:
    return Plan(
        solution,
        Target("process", {"process": 1}),
        [
            f"The plan assumes {report.batch_ids:,} ids per table and step. "
            "The times do not contain the other layers of the model."
        ],
    )


def problem_of_report(report: EmbeddingReport, budget: int) -> Problem:
    """Returns the problem of the layers of a report."""
    names: list[str] = []
    items: list[Item] = []
    for entry in report.entries:
        count = sum(name.split(" (")[0] == entry.path for name in names)
        names.append(f"{entry.path} ({count + 1})" if count else entry.path)
        items.append(_item(names[-1], entry, report))
    return Problem(("process",), (budget,), tuple(items))


def _item(name: str, entry: EmbeddingEntry, report: EmbeddingReport) -> Item:
    stock, sharded = report.expected_seconds(entry)
    return Item(
        name,
        "embedding",
        {name: (entry.num_rows, entry.dim)},
        (
            Choice(
                STOCK,
                "in the stock layer, whose steps read and write the full table",
                _memory(entry, entry.bytes_before),
                {"rows": stock},
            ),
            Choice(
                SHARDED,
                "in a ShardedEmbedding, whose steps read and write only the "
                "rows of a batch",
                _memory(entry, entry.bytes_after),
                {"rows": sharded},
                refused=None
                if entry.is_replaced
                else f"is not possible: {entry.reason}",
            ),
        ),
    )


def _memory(entry: EmbeddingEntry, num_bytes: int) -> dict[str, int]:
    return {
        "weights": entry.table_bytes,
        "slot variables": num_bytes - entry.table_bytes,
    }
