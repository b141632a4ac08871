"""Writes and checks the lists of slow cases and slow files.

    make test PYTEST_FLAGS=--junitxml=durations.xml
    .venv/bin/python -m tests.long_cases durations.xml
    .venv/bin/python -m tests.long_cases --check durations.xml

`make check` skips the cases in `long_cases.txt`. If files run in parallel, the
files in `long_files.txt` start first. The lists are generated, because
durations include the time to create models and meshes, and hand-written marks
would become outdated. Use only durations of full runs on an idle machine. Cases
and files that did not run stay in the lists if they still exist.

With `--check`, no list is written. The program fails if a slow case or a slow
file is missing in its list.
"""

import collections
import pathlib
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).parents[1]
LIST = pathlib.Path(__file__).with_name("long_cases.txt")
FILES = pathlib.Path(__file__).with_name("long_files.txt")
# Listed are cases and files that take at least this number of seconds. The
# limits of the check are higher: the first case of a worker that uses a package
# such as keras_hub also imports it, and another run has other first cases.
SECONDS, SECONDS_OF_FILE = 0.4, 10.0
LIMIT, LIMIT_OF_FILE = 6.0, 30.0
HEAD = """\
# Cases that took 0.4 seconds or more in a full run, written by
# tests.long_cases. `make check` skips them like cases with the mark `slow`.
"""
HEAD_OF_FILES = """\
# Test files that took 10 seconds or more in a full run, the longest first,
# written by tests.long_cases. If files run at the same time, these files start
# first, so that all workers end at about the same time.
"""


def read(path: pathlib.Path = LIST) -> tuple[str, ...]:
    """Returns the entries of a list."""
    return tuple(
        line
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    )


def node_id(case: xml.etree.ElementTree.Element) -> str:
    """Returns the pytest node id of a test case in a JUnit report."""
    module, name = case.get("classname", ""), case.get("name", "")
    classes = []
    while (
        module
        and not (ROOT / pathlib.Path(*module.split(".")))
        .with_suffix(".py")
        .exists()
    ):
        module, _, last = module.rpartition(".")
        classes.insert(0, last)
    return "::".join([module.replace(".", "/") + ".py", *classes, name])


def file_of(case: str) -> str:
    """Returns the file of a node id."""
    return case.partition("::")[0]


def durations(report: xml.etree.ElementTree.ElementTree) -> dict[str, float]:
    """Returns the seconds of each case of a JUnit report, by node id."""
    return {
        node_id(case): float(case.get("time", 0))
        for case in report.iter("testcase")
    }


def of_files(cases: dict[str, float]) -> dict[str, float]:
    """Returns the seconds of each file, the longest first."""
    seconds = collections.Counter()
    for case, duration in cases.items():
        seconds[file_of(case)] += duration
    return dict(seconds.most_common())


def missing(cases: dict[str, float]) -> list[str]:
    """Returns slow cases and slow files that are not in their list."""
    listed, listed_files = set(read()), set(read(FILES))
    return [
        f"{name} took {seconds:.1f} s"
        for found, limit, known in (
            (cases, LIMIT, listed),
            (of_files(cases), LIMIT_OF_FILE, listed_files),
        )
        for name, seconds in found.items()
        if seconds >= limit and name not in known
    ]


def updated(
    listed: tuple[str, ...], found: dict[str, float], limit: float
) -> list[str]:
    """Returns slow entries of `found`, then other entries of `listed`."""
    slow = [name for name, seconds in found.items() if seconds >= limit]
    return slow + [
        name
        for name in listed
        if name not in found and (ROOT / file_of(name)).exists()
    ]


def main(*arguments: str) -> None:
    *options, path = arguments
    cases = durations(xml.etree.ElementTree.parse(path))
    if options == ["--check"]:
        if offenders := missing(cases):
            sys.exit(
                "These are missing in tests/long_cases.txt and "
                "tests/long_files.txt; see tests/long_cases.py:\n"
                + "\n".join(offenders)
            )
        return
    slow = sorted(updated(read(), cases, SECONDS))
    LIST.write_text(HEAD + "".join(case + "\n" for case in slow))
    slow_files = updated(read(FILES), of_files(cases), SECONDS_OF_FILE)
    FILES.write_text(HEAD_OF_FILES + "".join(one + "\n" for one in slow_files))
    print(f"{len(slow)} cases, {len(slow_files)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
