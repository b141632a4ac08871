"""Writes `tests/long_cases.txt`: what `make check` leaves out by its duration.

    make test-all PYTEST_FLAGS=--junitxml=durations.xml
    .venv/bin/python -m tests.long_cases durations.xml

Durations include making a model or a mesh, so the mark `slow`, which is by
hand, would go stale. Only whole runs on a quiet machine are worth writing down.
"""

import pathlib
import sys
import xml.etree.ElementTree

LIST = pathlib.Path(__file__).with_name("long_cases.txt")
SECONDS = 0.7
HEAD = """\
# Cases that took 0.7 seconds or more in a whole run, as tests.long_cases wrote
# them: `make check` leaves them out, as those with the mark `slow`.
"""


def read() -> frozenset[str]:
    """The listed cases, as pytest names them."""
    return frozenset(
        line
        for line in LIST.read_text().splitlines()
        if line and not line.startswith("#")
    )


def node_id(case: xml.etree.ElementTree.Element) -> str:
    """What pytest calls a case of a JUnit report."""
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
