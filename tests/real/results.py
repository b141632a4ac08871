"""Results of test cases and their checks, and tables of results."""

import collections
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable

import rich.console
import rich.markup
import rich.table

# Statuses from the best to the worst. "unsupported": a check raised an error
# with a message for users. "crashed": a check raised an error whose message
# does not help users. "broken": the case fails without a mesh, so it cannot be
# compared.
STATUSES = ("trained", "unsupported", "differs", "crashed", "broken")
FAILURES = ("differs", "crashed", "broken")


@dataclasses.dataclass
class Check:
    """Result of one operation with and without a mesh."""

    name: str
    status: str = "trained"
    sentence: str = ""
    difference: float | None = None  # Largest relative difference.


@dataclasses.dataclass
class Result:
    """Result of one test case.

    Attributes:
      kind: Kind of the case, a key of `kinds.KINDS`.
      name: Name of the case.
      checks: Checks of the case, in the order in which they ran.
      whole: Warnings about operations that every device replicates.
      reason: Reason for the larger tolerance of this case, if it has one.
      seconds: Run time of the case.
      replicated_bytes: Bytes of the inputs and results of the operations that
        every device replicates in `fit` and `predict`; None if not measured.
    """

    kind: str
    name: str
    checks: list[Check] = dataclasses.field(default_factory=list)
    whole: list[str] = dataclasses.field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0
    replicated_bytes: int | None = None

    @property
    def status(self) -> str:
        """Returns the worst status of all checks."""
        return max(
            (check.status for check in self.checks),
            key=STATUSES.index,
            default="crashed",
        )

    @property
    def difference(self) -> float | None:
        """Returns the largest difference of all checks."""
        return max(
            (
                check.difference
                for check in self.checks
                if check.difference is not None
            ),
            default=None,
        )

    @property
    def sentence(self) -> str:
        """Returns the messages of the checks with the worst status."""
        return " / ".join(
            f"{check.name}: {check.sentence}"
            for check in self.checks
            if check.status == self.status and check.sentence
        )


def counts(results: Iterable[Result]) -> dict[str, int]:
    """Returns the number of cases of each status that occurs."""
    found = collections.Counter(result.status for result in results)
    return {status: found[status] for status in STATUSES if found[status]}


def by_kind(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Returns the results grouped by the kind of their case."""
    kinds = collections.defaultdict(list)
    for result in results:
        kinds[result.kind].append(result)
    return kinds


def to_json(results: Iterable[Result]) -> str:
    """Returns all fields of the results as JSON."""
    return json.dumps(
        [
            {**dataclasses.asdict(result), "status": result.status}
            for result in results
        ],
        indent=1,
    )


def from_json(text: str) -> list[Result]:
    """Returns the results that `to_json` wrote."""
    found = []
    for values in json.loads(text):
        del values["status"]
        checks = [Check(**check) for check in values.pop("checks")]
        found.append(Result(checks=checks, **values))
    return found


def _number(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.1e}"


def _operations(warning: str) -> str:
    """Returns the list of replicated operations in a warning.

    >>> _operations(
    ...     "DTensor cannot shard operations of the train step of model 'm', "
    ...     "so every device ...: 2 Split (no rule). Results ..."
    ... )
    'to train: 2 Split (no rule)'

    Args:
      warning: Message of a `LayoutMapWarning`. If the message has another
        format, it is returned unchanged.
    """
    found = re.match(
        r".* of the (\w+) step of model '[^']*', .*?: (.*?)(?:\. Results .*)?$",
        warning,
    )
    return f"to {found[1]}: {found[2]}" if found else warning


def _remark(result: Result, length: int) -> str:
    remarks = [result.sentence, result.reason]
    if result.whole:
        remarks.append(
            "replicated " + "; ".join(map(_operations, result.whole))
        )
    text = "; ".join(" ".join(remark.split()) for remark in remarks if remark)
    if len(text) <= length:
        return text
    # In the list of operations, each complete entry ends with ")". The last
    # entry can be cut off.
    entries, separator, _ = text[: length - 6].rpartition("); ")
    return f"{entries}); ..." if separator else text[: length - 3] + "..."


def print_table(results: Iterable[Result]) -> None:
    """Prints a table of all results and the counts for each kind."""
    console = rich.console.Console()
    for kind, found in by_kind(results).items():
        table = rich.table.Table(title=kind)
        for column in ("case", "result", "differs by", "remarks"):
            table.add_column(column, overflow="fold")
        for result in found:
            table.add_row(
                *map(
                    rich.markup.escape,
                    (
                        result.name,
                        result.status,
                        _number(result.difference),
                        _remark(result, 300),
                    ),
                )
            )
        console.print(table)
        console.print(f"{kind}: {counts(found)} of {len(found)}\n")


def _kibibytes(results: Iterable[Result]) -> str:
    sizes = [
        result.replicated_bytes
        for result in results
        if result.replicated_bytes is not None
    ]
    return f"{sum(sizes) / 1024:,.0f}" if sizes else ""


def _escaped(text: str) -> str:
    for character in "\\`*_{}[]|":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "&lt;")


# `write_page` does not change the lines of a page before this line.
MARK = "<!-- `make real` writes the rest of this page. -->\n"


def to_markdown(
    results: Iterable[Result], earlier: Iterable[Result] = ()
) -> str:
    """Returns a table of counts and one table per kind.

    Args:
      results: The results to show.
      earlier: Results of an earlier version of this package. If there are any,
        the tables have a column with their replicated bytes.
    """
    kinds = by_kind(results)
    known = {(one.kind, one.name): one for one in earlier}
    sizes = ["KiB earlier", "KiB replicated"] if known else ["KiB replicated"]

    def replicated(found: Iterable[Result]) -> str:
        before = [
            known[key]
            for key in ((one.kind, one.name) for one in found)
            if key in known
        ]
        cells = [_kibibytes(before)] if known else []
        return " | ".join([*cells, _kibibytes(found)])

    lines = [
        "| | cases | " + " | ".join([*STATUSES, *sizes]) + " |",
        "|---" * (len(STATUSES) + len(sizes) + 2) + "|",
    ]
    for kind, found in [*kinds.items(), ("all", sum(kinds.values(), []))]:
        number = counts(found)
        lines.append(
            f"| {kind} | {len(found)} | "
            + " | ".join(str(number.get(status, 0)) for status in STATUSES)
            + f" | {replicated(found)} |"
        )
    for kind, found in kinds.items():
        lines += [
            "",
            f"## {kind}",
            "",
            "| case | result | differs by | "
            + " | ".join(sizes)
            + " | remarks |",
            "|---" * (len(sizes) + 4) + "|",
        ]
        for result in found:
            name, remark = map(_escaped, (result.name, _remark(result, 400)))
            lines.append(
                f"| {name} | {result.status} | "
                f"{_number(result.difference)} | {replicated([result])} | "
                f"{remark} |"
            )
    return "\n".join(lines) + "\n"


def write_page(
    page: pathlib.Path,
    results: Iterable[Result],
    earlier: Iterable[Result] = (),
) -> None:
    """Replaces the tables of a page by new tables; see `to_markdown`."""
    text = page.read_text(encoding="utf-8")
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{page} must have the line {MARK!r}.")
    page.write_text(
        before + mark + "\n" + to_markdown(results, earlier), encoding="utf-8"
    )
