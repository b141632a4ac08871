"""What a case came to, check by check, and tables of it."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable

import rich.console
import rich.markup
import rich.table

# From the best to the worst. A refusal has a sentence; an error that only
# somebody who knows this package understands is a crash.
STATUSES = ("trained", "refused", "differs", "crashed", "broken")
# "broken": the case fails without a mesh, so it says nothing about one.
FAILURES = ("differs", "crashed", "broken")


@dataclasses.dataclass
class Check:
    """One thing that was done with and without a mesh."""

    name: str
    status: str = "trained"
    sentence: str = ""
    difference: float | None = None  # Relative, the largest.


@dataclasses.dataclass
class Result:
    """What became of one case."""

    kind: str
    name: str
    checks: list[Check] = dataclasses.field(default_factory=list)
    whole: list[str] = dataclasses.field(default_factory=list)
    reason: str = ""  # Why it may differ by more than others.
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """The worst status of its checks."""
        return max(
            (check.status for check in self.checks),
            key=STATUSES.index,
            default="crashed",
        )

    @property
    def difference(self) -> float | None:
        """The largest difference of all checks."""
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
        """What the checks of the worst status say."""
        return " / ".join(
            f"{check.name}: {check.sentence}"
            for check in self.checks
            if check.status == self.status and check.sentence
        )


def counts(results: Iterable[Result]) -> dict[str, int]:
    """How many cases came to each status; statuses of none left out."""
    found = collections.Counter(result.status for result in results)
    return {status: found[status] for status in STATUSES if found[status]}


def by_kind(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each kind, in their order."""
    kinds = collections.defaultdict(list)
    for result in results:
        kinds[result.kind].append(result)
    return kinds


def to_json(results: Iterable[Result]) -> str:
    """All there is to know, for programs."""
    return json.dumps(
        [
            {**dataclasses.asdict(result), "status": result.status}
            for result in results
        ],
        indent=1,
    )


def from_json(text: str) -> list[Result]:
    """What `to_json` wrote."""
    found = []
    for values in json.loads(text):
        del values["status"]
        checks = [Check(**check) for check in values.pop("checks")]
        found.append(Result(checks=checks, **values))
    return found


def _number(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.1e}"


def _remark(result: Result, length: int) -> str:
    remarks = [result.sentence, result.reason]
    if result.whole:
        remarks.append("computed whole: " + ", ".join(result.whole))
    text = "; ".join(" ".join(remark.split()) for remark in remarks if remark)
    return text if len(text) <= length else text[: length - 3] + "..."


def print_table(results: Iterable[Result]) -> None:
    """A table on the terminal, and how many cases came to what."""
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


def _escaped(text: str) -> str:
    for character in "\\`*_{}[]|":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "&lt;")


# What `write_page` keeps of a page ends with this line.
MARK = "<!-- What follows is written by `make real`. -->\n"


def to_markdown(results: Iterable[Result]) -> str:
    """How many cases came to what, and a table of each kind."""
    kinds = by_kind(results)
    lines = [
        "| | cases | " + " | ".join(STATUSES) + " |",
        "|---" * (len(STATUSES) + 2) + "|",
    ]
    for kind, found in [*kinds.items(), ("all", sum(kinds.values(), []))]:
        number = counts(found)
        lines.append(
            f"| {kind} | {len(found)} | "
            + " | ".join(str(number.get(status, 0)) for status in STATUSES)
            + " |"
        )
    for kind, found in kinds.items():
        lines += [
            "",
            f"## {kind}",
            "",
            "| case | result | differs by | remarks |",
            "|---|---|---|---|",
        ]
        for result in found:
            name, remark = map(_escaped, (result.name, _remark(result, 400)))
            lines.append(
                f"| {name} | {result.status} | "
                f"{_number(result.difference)} | {remark} |"
            )
    return "\n".join(lines) + "\n"


def write_page(page: pathlib.Path, results: Iterable[Result]) -> None:
    """Puts the tables of `results` into a page, in place of those there."""
    text = page.read_text(encoding="utf-8")
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{page} has no line {MARK!r}")
    page.write_text(
        before + mark + "\n" + to_markdown(results), encoding="utf-8"
    )
