"""Maintains the versions of Keras that the package supports.

    python -m tests.versions digests [--replace]

The command adds the digests of the replaced functions of the installed Keras to
the column of its minor version. `--replace` first empties the column, for
example if it has digests of a pre-release.
"""

import argparse
import csv
import io
import pathlib

from tf_layoutmap import process_report
from tf_layoutmap._core import keras_private


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    commands = parser.add_subparsers(dest="command", required=True)
    digests = commands.add_parser("digests")
    digests.add_argument("--replace", action="store_true")
    options = parser.parse_args()
    write_digests(options.replace)


if __name__ == "__main__":
    main()
