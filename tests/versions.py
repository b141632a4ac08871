"""Maintains the versions of Keras that the package supports.

    python -m tests.versions digests [--replace]
    python -m tests.versions run [--versions 3.12 ...] [--suites FOLDER ...]
        [--check]

`digests` adds the digests of the replaced functions of the installed Keras to
the column of its minor version. `--replace` first empties the column, for
example if it has digests of a pre-release.

`run` creates an environment for each version in build/versions, runs the fast
tests of the suites, and writes the table of docs/versions.md. An environment
has only Keras, and uses all other packages of the current environment. With
`--check`, the page is not written. The program then fails if a test fails; with
a version of Keras that is not released, only if no test passes, for example
because a private name is missing.
"""

import argparse
import csv
import io
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

from tf_layoutmap import process_report
from tf_layoutmap._core import keras_private, requirements

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/versions.md"
# The folders whose code depends on Keras most.
SUITES = (
    "tests/distribution",
    "tests/layout/keras3",
    "tests/layers/keras3",
    "tests/layers/base",
)
HEADER = (
    "| Keras | passed | failed | skipped | functions that were not tested |"
)


def with_column(
    table: str, column: str, digests: dict[str, str], replace: bool
) -> str:
    """Returns a table of digests with more digests in a column.

    >>> table = "function,3.12\\nf,a\\ng,b\\n"
    >>> print(with_column(table, "3.12", {"f": "c"}, False), end="")
    function,3.12
    f,a c
    g,b
    >>> print(with_column(table, "3.13", {"f": "d"}, False), end="")
    function,3.12,3.13
    f,a,d
    g,b,
    """
    rows = {row["function"]: row for row in csv.DictReader(io.StringIO(table))}
    header = next(csv.reader(io.StringIO(table)), [])
    if column not in header:
        header.append(column)
    for row in rows.values():
        if replace or row.get(column) is None:
            row[column] = ""
    for name, digest in digests.items():
        row = rows.setdefault(name, {"function": name})
        known = row.get(column, "").split()
        row[column] = " ".join(dict.fromkeys([*known, digest]))
    file = io.StringIO()
    writer = csv.DictWriter(file, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        rows[name] for name in sorted(rows) if any_cell(rows[name])
    )
    return file.getvalue()


def any_cell(row: dict[str, str]) -> bool:
    """Returns whether a row has a digest in one of its columns."""
    return any(value for name, value in row.items() if name != "function")


def write_digests(replace: bool) -> None:
    path: pathlib.Path = process_report.KERAS_DIGESTS
    digests = process_report.keras_digests()
    if "unreadable" in digests.values():
        raise SystemExit("The sources of the installed Keras are missing.")
    table = path.read_text() if path.exists() else "function\n"
    path.write_text(with_column(table, keras_private.COLUMN, digests, replace))


def python_of(version: str) -> pathlib.Path:
    """Creates an environment with a version of Keras; returns its Python."""
    folder = ROOT / "build/versions" / version
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", folder], check=True
        )
    (packages,) = folder.glob("lib/python*/site-packages")
    # Keras is found before the packages of the current environment.
    (packages / "current.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    install += ["--upgrade", "--target", str(packages)]
    done = subprocess.run([*install, f"keras=={version}.*"], check=False)
    if done.returncode != 0:
        # The version is not released yet.
        subprocess.run([*install, "--pre", "keras-nightly"], check=True)
    return python


FACTS = """
import keras
from tf_layoutmap import process_report
print(keras.__version__, len(process_report.unknown_functions()))
"""


def run_version(version: str, suites: list[str]) -> tuple[str, bool]:
    """Runs the tests with a version of Keras.

    Returns:
      The row of the table, and whether the check passes.
    """
    python = python_of(version)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    has_run = True
    for suite in suites:
        command = [python, "-m", "pytest", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=--import-mode=importlib", "--tb=short"]
        command += ["-n", "2", "--dist", "loadfile"]
        done = subprocess.run(
            [*command, "-m", "not slow and not exhaustive", suite],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout, flush=True)
        found = counts_of(done.stdout)
        if done.returncode not in (0, 1) or not found["passed"]:
            has_run = False
            found["failed"] += 1
        for name in counts:
            counts[name] += found[name]
    facts = subprocess.run(
        [python, "-c", FACTS],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    is_released = "dev" not in facts[-2]
    passes = has_run and not (is_released and counts["failed"])
    return row(facts[-2], counts, int(facts[-1])), passes


def counts_of(output: str) -> dict[str, int]:
    """Returns the counts in the last line of pytest's output.

    >>> counts_of("= 1 failed, 12 passed, 3 deselected, 2 errors in 0.1s =")
    {'passed': 12, 'failed': 3, 'skipped': 0}
    """
    last = output.strip().rpartition("\n")[2]
    found = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", last)}
    errors = found.get("error", 0) + found.get("errors", 0)
    return {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + errors,
        "skipped": found.get("skipped", 0),
    }


def row(version: str, counts: dict[str, int], unknown: int) -> str:
    cells = [version, *map(str, counts.values()), str(unknown or "none")]
    return f"| {' | '.join(cells)} |"


def with_rows(page: str, rows: list[str]) -> str:
    """Returns a page with other rows of the versions that were run.

    >>> page = HEADER + "\\n|---|\\n| 3.12.0 | 1 |\\n| 3.13.1 | 1 |\\n\\nText"
    >>> print(with_rows(page, ["| 3.12.4 | 2 |"]).partition("|---|")[2])
    <BLANKLINE>
    | 3.12.4 | 2 |
    | 3.13.1 | 1 |
    <BLANKLINE>
    Text
    """
    before, header, after = page.partition(HEADER)
    if not header:
        raise ValueError(f"The page must have a table with the row {HEADER!r}.")
    table, blank, rest = after.partition("\n\n")
    _, line, *old = table.split("\n")
    minor_of = {
        requirements.minor(one.split()[1]): one for one in [*old, *rows]
    }
    ordered = sorted(minor_of, key=lambda one: int(one.split(".")[1]))
    lines = [header, line, *(minor_of[one] for one in ordered)]
    return before + "\n".join(lines) + blank + rest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    commands = parser.add_subparsers(dest="command", required=True)
    digests = commands.add_parser("digests")
    digests.add_argument("--replace", action="store_true")
    run = commands.add_parser("run")
    run.add_argument("--versions", nargs="+", default=requirements.KERAS)
    run.add_argument("--suites", nargs="+", default=SUITES)
    run.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.command == "digests":
        write_digests(options.replace)
        return
    failed = []
    for version in options.versions:
        found, passes = run_version(version, options.suites)
        print(found, flush=True)
        if not passes:
            failed.append(version)
        if not options.check:
            PAGE.write_text(with_rows(PAGE.read_text(), [found]))
    if options.check and failed:
        raise SystemExit(f"The check fails for Keras {', '.join(failed)}.")


if __name__ == "__main__":
    main()
