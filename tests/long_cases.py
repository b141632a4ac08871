"""Writes `tests/long_cases.txt`, the slow cases that `make check` skips.

    make test-all PYTEST_FLAGS=--junitxml=durations.xml
    .venv/bin/python -m tests.long_cases durations.xml

The list is generated, because durations include the time to create models and
meshes, and hand-written marks would become outdated. Use only durations of full
runs on an idle machine.
"""

import pathlib
import sys
import xml.etree.ElementTree

LIST = pathlib.Path(__file__).with_name("long_cases.txt")
SECONDS = 0.7
HEAD = """\
# Cases that took 0.7 seconds or more in a full run, written by
# tests.long_cases. `make check` skips them like cases with the mark `slow`.
"""


def read() -> frozenset[str]:
    """Returns the node ids of the listed cases."""
    return frozenset(
        line
        for line in LIST.read_text().splitlines()
        if line and not line.startswith("#")
    )


def node_id(case: xml.etree.ElementTree.Element) -> str:
    """Returns the pytest node id of a test case in a JUnit report."""
    module, name = case.get("classname", ""), case.get("name", "")
    classes = []
    while (
        module
        and not pathlib.Path(*module.split(".")).with_suffix(".py").exists()
    ):
        module, _, last = module.rpartition(".")
        classes.insert(0, last)
    return "::".join([module.replace(".", "/") + ".py", *classes, name])


def main() -> None:
    report = xml.etree.ElementTree.parse(sys.argv[1])
    cases = sorted(
        node_id(case)
        for case in report.iter("testcase")
        if float(case.get("time", 0)) >= SECONDS
    )
    LIST.write_text(HEAD + "".join(case + "\n" for case in cases))
    print(f"{len(cases)} cases: {LIST}")


if __name__ == "__main__":
    main()
