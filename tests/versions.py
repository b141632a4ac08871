"""Maintains the versions of TensorFlow and Keras that the package supports.

    python -m tests.versions digests [--replace]
    python -m tests.versions run [--versions 3.12 ...] [--suites FOLDER ...]
        [--check]
    python -m tests.versions accept write|read [--versions 3.12 ...]
    python -m tests.versions tensorflow_tpu [--suites FOLDER ...]

`digests` adds the digests of the replaced functions of the installed Keras to
the column of its minor version. `--replace` first empties the column, for
example if it has digests of a pre-release.

`run` creates an environment for each version of Keras in build/versions, runs
the fast tests of the suites, and writes the table of docs/versions.md. An
environment has only Keras, and uses all other packages of the current
environment, including TensorFlow. With `--check`, the page is not written. The
program then fails if a test fails; with a version of Keras that is not
released, only if no test passes, for example because a private name is missing.

`accept write` runs the programs of the first pages, and saves models in
build/versions/files. `accept read` then loads the models that all versions have
saved, and writes another table of docs/versions.md. `make versions` and `make
acceptance` run these commands with each version of TensorFlow, and with TF=2.20
with one version.

`tensorflow_tpu` creates an environment with tensorflow-tpu and a libtpu that it
supports, and runs the self-check and the tests of the suites. The environment
uses all other packages of the current environment, including the libraries of
this package. A TPU is not required. `make test-tensorflow-tpu` runs this
command.
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
# The folders that run with tensorflow-tpu.
TPU_SUITES = ("tests/embedding/tpu", "tests/kernels")
FAST_TESTS = ("-n", "2", "--dist", "loadfile")
FAST_TESTS += ("-m", "not slow and not exhaustive")
# All tests of these folders are slow.
SLOW_SUITES = ("tests/stock",)
HEADER = (
    "| TensorFlow | Keras | passed | failed | skipped | functions not tested |"
)
ACCEPTANCE = "tests/acceptance/test_versions.py"
FILES = ROOT / "build/versions/files"
ACCEPTANCE_HEADER = (
    "| TensorFlow | Keras | programs and own files | files of all versions |"
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


def environment(name: str) -> tuple[pathlib.Path, list[str]]:
    """Creates an environment that also uses the packages of the current one.

    Returns:
      The Python of the environment, and a command that installs packages in the
      environment. They are found before the packages of the current
      environment.
    """
    folder = ROOT / "build/versions" / name
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", folder], check=True
        )
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "current.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    return python, [*install, "--upgrade", "--target", str(packages)]


def python_of(version: str) -> pathlib.Path:
    """Creates an environment with a version of Keras; returns its Python."""
    python, install = environment(f"tf{requirements.built_for()}-{version}")
    done = subprocess.run([*install, f"keras=={version}.*"], check=False)
    if done.returncode != 0:
        # The version is not released yet.
        subprocess.run([*install, "--pre", "keras-nightly"], check=True)
    return python


def run_tensorflow_tpu(suites: list[str]) -> None:
    """Runs the self-check and tests with tensorflow-tpu, without a TPU."""
    version = requirements.TENSORFLOW_TPU
    if requirements.built_for() != version:
        raise SystemExit(
            f"The libraries must be built for TensorFlow {version}, the version"
            f" of tensorflow-tpu. Received: {requirements.built_for()}. Run "
            f"`make build TF={version}`."
        )
    python, install = environment("tensorflow-tpu")
    first, unsupported = requirements.LIBTPU
    subprocess.run(
        [
            *install,
            f"tensorflow-tpu=={version}.*",
            f"libtpu>={first},<{unsupported}",
        ],
        check=True,
    )
    # Without this variable, libtpu asks the metadata server of a Cloud TPU VM.
    variables = {"TPU_SKIP_MDS_QUERY": "1"}
    subprocess.run(
        [python, "-m", "tf_layoutmap"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        check=True,
    )
    counts, has_run = run_tests(python, *FAST_TESTS, *suites, **variables)
    if counts["failed"] or not has_run:
        raise SystemExit(f"Tests fail with tensorflow-tpu: {counts}.")


FACTS = """
import keras, tensorflow
from tf_layoutmap import process_report
unknown = process_report.unknown_functions()
print(tensorflow.__version__, keras.__version__, len(unknown))
"""


def facts_of(python: pathlib.Path) -> tuple[str, str, int]:
    """Returns both versions and the number of functions not tested."""
    printed = subprocess.run(
        [python, "-c", FACTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    tensorflow, keras, unknown = printed.split()[-3:]
    return tensorflow, keras, int(unknown)


def run_tests(
    python: pathlib.Path, *arguments: str, **environment: str
) -> tuple[dict[str, int], bool]:
    """Runs tests, and returns their counts and whether they have run."""
    command = [python, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "--tb=short"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    counts = counts_of(done.stdout)
    has_run = done.returncode in (0, 1) and counts["passed"] > 0
    if not has_run:
        counts["failed"] += 1
    return counts, has_run


def run_version(version: str, suites: list[str]) -> tuple[str, bool]:
    """Runs the tests with a version of Keras.

    Returns:
      The row of the table, and whether the check passes.
    """
    python = python_of(version)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    all_have_run = True
    for suite in suites:
        slow = ("-m", "not exhaustive") if suite in SLOW_SUITES else ()
        found, has_run = run_tests(python, *FAST_TESTS, *slow, suite)
        all_have_run = all_have_run and has_run
        for name in counts:
            counts[name] += found[name]
    tensorflow, keras, unknown = facts_of(python)
    is_released = "dev" not in keras
    passes = all_have_run and not (is_released and counts["failed"])
    cells = [*map(str, counts.values()), str(unknown or "none")]
    return row(tensorflow, keras, *cells), passes


def accept(version: str, step: str) -> tuple[str, bool]:
    """Runs one step of `make acceptance` with a version of Keras.

    Returns:
      The row of the table, and whether all tests pass. The row is complete
      after the step `read`.
    """
    python = python_of(version)
    tensorflow, keras, _ = facts_of(python)
    FILES.mkdir(parents=True, exist_ok=True)
    programs = FILES / f"tf{tensorflow}-keras{keras}.programs"
    counts, _ = run_tests(
        python,
        *(ACCEPTANCE, "-m", "", "-k"),
        "test_read_a_file" if step == "read" else "not test_read_a_file",
        TF_LAYOUTMAP_MODEL_FILES=str(FILES),
    )
    if step == "write":
        programs.write_text(outcome(counts))
    cells = programs.read_text(), outcome(counts)
    return row(tensorflow, keras, *cells), not counts["failed"]


def outcome(counts: dict[str, int]) -> str:
    """Describes the counts of tests.

    >>> outcome({"passed": 3, "failed": 1, "skipped": 0})
    '3 of 4'
    """
    return f"{counts['passed']} of {counts['passed'] + counts['failed']}"


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


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def pair_of(row_of_table: str) -> tuple[tuple[int, ...], ...]:
    """Returns the minor versions of TensorFlow and Keras of a row.

    >>> pair_of("| 2.20.0 | 3.12.4 | 7 |")
    ((2, 20), (3, 12))
    """
    _, tensorflow, keras, *_ = row_of_table.split("|")
    return tuple(
        tuple(map(int, requirements.minor(one.strip()).split(".")))
        for one in (tensorflow, keras)
    )


def with_rows(page: str, header: str, rows: list[str]) -> str:
    """Returns a page with other rows of the versions that were run.

    >>> first, second = "| 2.20.0 | 3.12.0 | 1 |", "| 2.20.0 | 3.13.1 | 1 |"
    >>> page = f"{HEADER}\\n|---|\\n{first}\\n{second}\\n\\nText"
    >>> new = ["| 2.20.0 | 3.12.4 | 2 |", "| 2.21.0 | 3.12.4 | 2 |"]
    >>> print(with_rows(page, HEADER, new).partition("|---|")[2])
    <BLANKLINE>
    | 2.20.0 | 3.12.4 | 2 |
    | 2.20.0 | 3.13.1 | 1 |
    | 2.21.0 | 3.12.4 | 2 |
    <BLANKLINE>
    Text
    """
    before, found, after = page.partition(header)
    if not found:
        raise ValueError(f"The page must have a table with the row {header!r}.")
    table, blank, rest = after.partition("\n\n")
    _, line, *old = table.split("\n")
    by_pair = {pair_of(one): one for one in [*old, *rows]}
    lines = [header, line, *(by_pair[one] for one in sorted(by_pair))]
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
    on_tpu = commands.add_parser("tensorflow_tpu")
    on_tpu.add_argument("--suites", nargs="+", default=TPU_SUITES)
    accepting = commands.add_parser("accept")
    accepting.add_argument("step", choices=["write", "read"])
    accepting.add_argument(
        "--versions",
        nargs="+",
        # Keras 3.16 is not released, and saves files that can still change.
        default=requirements.KERAS[:-1],
    )
    options = parser.parse_args()
    if options.command == "digests":
        write_digests(options.replace)
        return
    if options.command == "tensorflow_tpu":
        run_tensorflow_tpu(options.suites)
        return
    failed = []
    header = HEADER if options.command == "run" else ACCEPTANCE_HEADER
    for version in options.versions:
        if options.command == "run":
            found, passes = run_version(version, options.suites)
            is_written = not options.check
        else:
            found, passes = accept(version, options.step)
            is_written = options.step == "read"
        print(found, flush=True)
        if not passes:
            failed.append(version)
        if is_written:
            PAGE.write_text(with_rows(PAGE.read_text(), header, [found]))
    if failed and (options.command == "accept" or options.check):
        raise SystemExit(f"The check fails for Keras {', '.join(failed)}.")


if __name__ == "__main__":
    main()
