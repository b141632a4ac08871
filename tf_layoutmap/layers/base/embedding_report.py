"""`EmbeddingReport`: which `Embedding` layers were replaced, and the effect.

The expected times are estimates from bytes. A step of a stock layer reads and
writes the full table, a step of a replaced layer only the rows of the batch.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tf_layoutmap.planning import budgets, search
from tf_layoutmap.planning.plan import Plan, Target
from tf_layoutmap.planning.problem import Choice, Item, Problem
from tf_layoutmap.planning.search import Solution

# Choices of an `Embedding` layer in a plan: the stock layer, whose steps read
# and write the full table, or a replaced layer.
STOCK, SHARDED = "stock", "sharded"

# Bytes that a training step reads and writes per byte of a stock table:
# gradient update of the table, of its slot variables, and the temporary arrays
# of the full size. The values are estimates; `python -m benchmarks
# replaced_embeddings` measures steps.
_STOCK_PASSES = {"rows": 0.0, "adagrad": 6.0, "adam": 12.0}
# Bytes per byte of a distinct row: the lookup, the gradient, and the update of
# the row and its slot variable.
_ROW_PASSES = 16.0
# Seconds of one replaced table that do not depend on its size: the ops of the
# lookup, of the search for unique rows and of the update.
_SECONDS_PER_TABLE = 250e-6
# Array that is copied to measure the memory bandwidth, in bytes.
_COPIED_BYTES = 64 * 2**20


@functools.cache
def memory_bandwidth() -> float:
    """Returns bytes per second of a copy, measured once in about 0.1 s."""
    source = np.ones(_COPIED_BYTES // 4, np.float32)
    target = np.empty_like(source)
    np.copyto(target, source)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * _COPIED_BYTES / min(seconds)


@dataclasses.dataclass(frozen=True)
class EmbeddingEntry:
    """One `Embedding` layer of a report.

    Attributes:
      path: Path of the layer; its name if it is not built.
      kind: Name of the layer's class.
      num_rows: Number of rows of the table.
      dim: Number of columns of the table.
      is_replaced: Whether the layer is replaced.
      reason: Reason why the layer is not replaced; empty if it is replaced.
      differences: Sentences about training that differs from the stock layer.
      bytes_before: Bytes of the stock table and its slot variables.
      bytes_after: Bytes of the table and its slot variables.
      rule_source: The rule and the learning rate of a replaced table as text,
        or a function that returns this text, if the model is not compiled.
    """

    path: str
    kind: str
    num_rows: int
    dim: int
    is_replaced: bool
    reason: str = ""
    differences: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    rule_source: str | Callable[[], str] = dataclasses.field(
        default="", repr=False, compare=False
    )

    @property
    def rule(self) -> str:
        """The rule and the learning rate; empty if it is not replaced."""
        source = self.rule_source
        return source() if callable(source) else source

    def to_dict(self) -> dict[str, object]:
        """Returns the entry as plain values."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "rule_source"
        }
        return {**values, "rule": self.rule}

    @property
    def table_bytes(self) -> int:
        """Bytes of the table without slot variables."""
        return 4 * self.num_rows * self.dim


@dataclasses.dataclass
class EmbeddingReport:
    """The `Embedding` layers of a model, and the effect of replacing them.

    >>> import keras
    >>> import tf_layoutmap as tlm
    >>> model = keras.Sequential([
    ...     keras.Input([2], dtype="int64"),
    ...     keras.layers.Embedding(1000, 4, name="words")])
    >>> report = tlm.layers.shard_embeddings(model, min_rows=500)
    >>> [entry.num_rows for entry in report.replaced]
    [1000]
    >>> report.to_dict()["bytes_after"]
    48000

    Attributes:
      entries: One entry per `Embedding` layer of the model.
      stock_rule: How the stock optimizer updates a table: `"rows"` if it
        updates only the rows of a batch (SGD, and Adagrad of tf_keras),
        `"adagrad"` for Adagrad of Keras 3, or `"adam"` for any other optimizer.
      ids_per_step: Number of ids that a step looks up in each table, for the
        expected times.
      memory_plan: The plan that selected the replaced layers, or None.
    """

    entries: list[EmbeddingEntry] = dataclasses.field(default_factory=list)
    stock_rule: str = "adagrad"
    ids_per_step: int = 2048
    memory_plan: Plan | None = None

    @property
    def replaced(self) -> list[EmbeddingEntry]:
        """The entries of layers that are replaced."""
        return [entry for entry in self.entries if entry.is_replaced]

    @property
    def not_replaced(self) -> list[EmbeddingEntry]:
        """The entries of layers that are not replaced, with reasons."""
        return [entry for entry in self.entries if not entry.is_replaced]

    @property
    def bytes_before(self) -> int:
        """Bytes of all stock tables and their slot variables."""
        return sum(entry.bytes_before for entry in self.entries)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tables and their slot variables after replacement."""
        return sum(entry.bytes_after for entry in self.entries)

    def expected_step_ms(self) -> tuple[float, float]:
        """Returns the expected time of the tables in a step, before and after.

        The times are the bytes that a step reads and writes, divided by the
        memory bandwidth, which the first call measures. A stock layer reads
        and writes the full table several times; the number depends on
        `stock_rule`. A replaced layer reads and writes `ids_per_step` rows, and
        takes a fixed time per table. The times do not contain the other layers
        of the model, and the actual times can differ by a factor of two.

        Returns:
          Milliseconds of all tables before and after the replacement.
        """
        before = after = 0.0
        for entry in self.entries:
            stock, replaced = self.expected_seconds(entry)
            before += stock
            after += replaced if entry.is_replaced else stock
        return 1e3 * before, 1e3 * after

    def expected_seconds(self, entry: EmbeddingEntry) -> tuple[float, float]:
        """Returns the expected time of a table in a step, before and after.

        Args:
          entry: Entry of this report. The second time is the time after a
            replacement, also if the layer is not replaced.
        """
        bandwidth = memory_bandwidth()
        rows = min(self.ids_per_step, entry.num_rows)
        looked_up = _ROW_PASSES * 4 * rows * entry.dim / bandwidth
        stock = looked_up + (
            _STOCK_PASSES[self.stock_rule] * entry.table_bytes / bandwidth
        )
        return stock, looked_up + _SECONDS_PER_TABLE

    @property
    def plan(self) -> Plan:
        """Plan with the reasons and costs of the replaced layers.

        This is the plan that `shard_embeddings` made if `memory` was passed.
        Otherwise, the plan has the choices of this report.
        """
        if self.memory_plan is not None:
            return self.memory_plan
        return _plan_of_report(self)

    def to_dict(self) -> dict[str, object]:
        """Returns the report as plain values, for example for JSON."""
        before, after = self.expected_step_ms()
        return {
            "layers": [entry.to_dict() for entry in self.entries],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "step_ms_before": before,
            "step_ms_after": after,
            "ids_per_step": self.ids_per_step,
        }

    def print(self) -> None:
        """Prints the report."""
        print(self)

    def __str__(self) -> str:
        if not self.entries:
            return "The model has no stock Embedding layers."
        lines = [f"Replaced: {len(self.replaced)} Embedding layers"]
        lines += [
            f"  {_describe(entry)}: trained with {entry.rule}"
            for entry in self.replaced
        ]
        lines.append(f"Not replaced: {len(self.not_replaced)}")
        lines += [
            f"  {_describe(entry)}: {entry.reason}"
            for entry in self.not_replaced
        ]
        sentences: dict[str, None] = {}
        for entry in self.replaced:
            sentences.update(dict.fromkeys(entry.differences))
        if self.replaced:
            lines.append(
                "Training compared with the stock layers:"
                if sentences
                else "Training equals the stock layers."
            )
            lines += [f"  {sentence}" for sentence in sentences]
        before, after = self.expected_step_ms()
        lines += [
            "Tables and slot variables: "
            f"{self.bytes_before / 1e6:,.1f} MB before, "
            f"{self.bytes_after / 1e6:,.1f} MB after",
            f"Expected time of the tables in a step of {self.ids_per_step:,} "
            f"ids per table: {before:,.1f} ms before, {after:,.1f} ms after",
        ]
        return "\n".join(lines)


def _describe(entry: EmbeddingEntry) -> str:
    return f"{entry.path} ({entry.kind}, {entry.num_rows:,} x {entry.dim})"


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
    problem = _problem_of_report(report, budgets.read_budgets(memory, 1)[0])
    return _plan(search.solve(problem, pins), report)


def _plan_of_report(report: EmbeddingReport) -> Plan:
    """Returns a plan with the choices that a report already contains."""
    problem = _problem_of_report(
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
            f"The plan assumes {report.ids_per_step:,} ids per table and step. "
            "The times do not contain the other layers of the model."
        ],
    )


def _problem_of_report(report: EmbeddingReport, budget: int) -> Problem:
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
                "rows of a batch"
                + (f", with the rule of {entry.rule}" if entry.rule else ""),
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
