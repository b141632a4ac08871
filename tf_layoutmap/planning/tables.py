"""Plans the tables of a `TPUEmbedding` feature config.

The module reads configs and id reports. `table_choices.py` computes the bytes
and times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_layoutmap._core import checks
from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.configs import config, open_tables
from tf_layoutmap.embedding.configs import table_dtypes as dtypes
from tf_layoutmap.planning import budgets as memory_budgets
from tf_layoutmap.planning import search, table_choices
from tf_layoutmap.planning.costs import MachineCosts
from tf_layoutmap.planning.plan import Plan, Target
from tf_layoutmap.planning.problem import Problem
from tf_layoutmap.planning.table_choices import Lookups
from tf_layoutmap.vocabulary import first_values, open_vocabulary

_DEFAULT_BATCH_SIZE = 1024


def plan_tables(
    feature_config: Any,
    *,
    num_servers: int | None,
    num_workers: int | None,
    memory: Any,
    id_report: Any,
    optimizer: Any,
    batch_size: int | None,
    pins: Mapping[Any, str] | None,
    table_dtypes: Any,
    vocabularies: Any,
    wire_dtype: str,
    costs: MachineCosts,
) -> Plan:
    """Returns a plan for the tables of a feature config; see `tlm.plan`."""
    spec, configs = config.read_feature_config(
        inputs.flatten_with_paths(feature_config), optimizer
    )
    spec = dtypes.with_dtypes(spec, configs, table_dtypes)
    spec = open_tables.with_vocabularies(
        spec,
        configs,
        vocabularies,
        open_vocabulary.OpenVocabulary,
        first_values.read_initializer,
    )
    checks.check_one_of("wire_dtype", wire_dtype, ("float32", "bfloat16"))
    shared = open_tables.owners_by_name(spec)
    if shared and num_servers is not None:
        raise NotImplementedError(
            "Argument `vocabularies` must have a separate "
            "tlm.vocabulary.OpenVocabulary for each table if `num_servers` is "
            "passed, because a plan places each table separately. To train "
            "tables that share a vocabulary, create the TPUEmbedding without a "
            "plan. Received: "
            f"tables that share the vocabulary of another table, {shared}."
        )
    named_pins = {
        key
        if isinstance(key, str)
        else spec.tables[
            config.index_of_table(key, spec, configs, "pins")
        ].name: pin
        for key, pin in (pins or {}).items()
    }
    return plan_spec(
        spec,
        num_servers=num_servers,
        num_workers=num_workers,
        memory=memory,
        workload=read_workload(spec, id_report, batch_size),
        pins=named_pins,
        wire_bytes=2 if wire_dtype == "bfloat16" else 4,
        costs=costs,
    )


@dataclasses.dataclass(frozen=True)
class Workload:
    """Workload of all tables, and a sentence about its source."""

    lookups: tuple[Lookups, ...]
    note: str


def plan_spec(
    spec: config.EmbeddingSpec,
    *,
    num_servers: int | None,
    num_workers: int | None,
    memory: Any,
    workload: Workload,
    pins: Mapping[str, str],
    wire_bytes: int,
    costs: MachineCosts,
) -> Plan:
    """Returns a plan for the tables of a spec."""
    if num_servers is not None and num_workers is not None:
        raise ValueError(
            "Arguments `num_servers` and `num_workers` must not both be given. "
            f"Received: num_servers={num_servers!r}, "
            f"num_workers={num_workers!r}."
        )
    kind, count = "process", 1
    for name, value in (("servers", num_servers), ("workers", num_workers)):
        if value is not None:
            kind = name
            count = checks.check_int(f"num_{name}", value, lowest=1)
    budgets = memory_budgets.read_budgets(memory, count)
    build = _builder(kind, workload.lookups, costs, budgets, wire_bytes)
    solution = search.solve(
        build(spec, count),
        pins,
        suggest=lambda: table_choices.suggestions(
            spec, build, kind, count, pins
        ),
    )
    notes = [workload.note]
    untrained = [table.name for table in spec.tables if table.optimizer is None]
    if untrained:
        notes.append(
            "The bytes contain no slot variables for tables without an "
            f"optimizer: {', '.join(untrained)}. If the tables are trained, "
            "pass `optimizer`."
        )
    return Plan(solution, Target(kind, {kind: count}), notes)


def _builder(
    kind: str,
    lookups: Sequence[Lookups],
    costs: MachineCosts,
    budgets: Sequence[int],
    wire_bytes: int,
) -> Callable[[config.EmbeddingSpec, int], Problem]:
    """Returns a function that builds the problem for a number of devices.

    If the number differs from the number of budgets, each device has the
    smallest budget.
    """

    def build(spec: config.EmbeddingSpec, count: int) -> Problem:
        sizes = budgets if count == len(budgets) else (min(budgets),) * count
        if kind == "servers":
            return table_choices.problem_for_servers(
                spec, lookups, costs, sizes, wire_bytes
            )
        if kind == "workers":
            return table_choices.problem_for_workers(
                spec, lookups, costs, sizes
            )
        return table_choices.problem_for_process(spec, lookups, costs, sizes[0])

    return build


def read_workload(
    spec: config.EmbeddingSpec, id_report: Any, batch_size: int | None
) -> Workload:
    """Returns the workload of each table in a step of one process.

    Args:
      spec: The tables and features.
      id_report: Result of `tlm.inspect_ids`, the dict of its `to_dict`, or
        None.
      batch_size: Number of samples in a step, or None for the batches that
        `id_report` describes.

    Raises:
      TypeError: If `id_report` has another type.
      ValueError: If `id_report` has no batches, or not the same tables.
    """
    if batch_size is not None:
        batch_size = checks.check_int("batch_size", batch_size, lowest=1)
    if id_report is None:
        size = batch_size or _DEFAULT_BATCH_SIZE
        return Workload(
            tuple(
                _uniform_lookups(spec, index, size)
                for index in range(len(spec.tables))
            ),
            f"The plan assumes batches of {size:,} samples with one uniformly "
            "distributed id per feature, because no report of tlm.inspect_ids "
            "was passed as `id_report`.",
        )
    report = id_report.to_dict() if hasattr(id_report, "to_dict") else id_report
    if not isinstance(report, Mapping) or "num_batches" not in report:
        raise TypeError(
            checks.message(
                "id_report", "a report of tlm.inspect_ids, or None", id_report
            )
        )
    missing = [
        table.name
        for table in spec.tables
        if table.name not in report["tables"]
    ]
    missing += [
        feature.name
        for feature in spec.features
        if feature.name not in report["features"]
    ]
    if missing or not report["num_batches"]:
        raise ValueError(
            "Argument `id_report` must be a report of tlm.inspect_ids about "
            "the same feature config, with at least one batch. Received: a "
            f"report of {report['num_batches']} batches"
            + (f" without {missing[0]!r}." if missing else ".")
        )
    lookups = _reported_lookups(spec, report, batch_size)
    size = batch_size or round(
        max(counts["num_samples"] for counts in report["features"].values())
        / report["num_batches"]
    )
    return Workload(
        lookups,
        f"The plan assumes batches of {size:,} samples, with the numbers of "
        f"unique rows from a report of {report['num_batches']:,} batches.",
    )


def _positions(feature: config.FeatureSpec) -> int:
    """Returns the number of activations per sample."""
    if feature.is_sequence:
        return feature.max_sequence_length
    if feature.output_shape is not None:
        return math.prod(size for size in feature.output_shape[1:] if size)
    return 1


def _uniform_lookups(
    spec: config.EmbeddingSpec, index: int, batch_size: int
) -> Lookups:
    """Returns the workload of one uniformly distributed id per position."""
    table = spec.tables[index]
    count = batch_size * sum(
        _positions(feature)
        for feature in spec.features
        if feature.table == index
    )
    # The expected number of distinct values of `count` draws.
    unique = -table.num_rows * math.expm1(
        count * math.log1p(-1 / table.num_rows)
        if table.num_rows > 1
        else -math.inf
    )
    return Lookups(float(round(unique)), count, count)


def _reported_lookups(
    spec: config.EmbeddingSpec,
    report: Mapping[str, Any],
    batch_size: int | None,
) -> tuple[Lookups, ...]:
    batches = report["num_batches"]
    lookups = []
    for index, table in enumerate(spec.tables):
        features = [
            (feature, report["features"][feature.name])
            for feature in spec.features
            if feature.table == index
        ]
        counted = report["tables"][table.name]
        ids = sum(counts["num_ids"] for _, counts in features) / batches
        samples = max(counts["num_samples"] for _, counts in features) / batches
        activations = (
            sum(
                _positions(feature) * counts["num_samples"]
                for feature, counts in features
            )
            / batches
        )
        unique = counted["mean_unique_per_batch"]
        if batch_size is not None and samples:
            scale = batch_size / samples
            ids, activations = ids * scale, activations * scale
            unique *= scale ** _growth(unique, counted["num_distinct"], batches)
        lookups.append(
            Lookups(min(unique, ids, table.num_rows), ids, activations)
        )
    return tuple(lookups)


def _growth(unique: float, distinct: int, batches: int) -> float:
    """Returns the exponent with which distinct rows grow with a batch.

    The exponent is derived from the distinct rows of one batch and of all
    batches. It is 1 if no two batches have a row in common.

    >>> _growth(100.0, 100, 10), round(_growth(100.0, 1000, 10), 6)
    (0.0, 1.0)
    """
    if batches < 2 or unique <= 0:
        return 1.0
    exponent = math.log(max(distinct, 1) / unique) / math.log(batches)
    return min(max(exponent, 0.0), 1.0)
