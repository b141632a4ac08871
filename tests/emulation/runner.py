"""Runs test modules in a process of their own.

Kernels for TensorFlow's ops are registered for good, so the emulation must not
come into the process of other tests; and a process emulates one TPU.
"""

import os
import pathlib
import tempfile
import xml.etree.ElementTree as ET

from tests import forked_process

ROOT = pathlib.Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Finds this checkout, from any directory."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "TF_LAYOUTMAP_PROGRAM": "1", "PYTHONPATH": path}


def _pytest(*arguments: str, seconds: float, **variables: str):
    return forked_process.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**environment(), **variables},
        seconds=seconds,
    )


def run(
    path: str, *arguments: str, seconds: int = 300, **variables: str
) -> None:
    """Runs a file below tests/ with pytest; an error if not all passed.

    The file finds `variables` in its environment.
    """
    done = _pytest(
        "-x",
        str(ROOT / "tests" / path),
        *arguments,
        seconds=seconds,
        **variables,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def run_programs(
    *names: str, seconds: int = 900, **variables: str
) -> dict[str, str]:
    """Runs files of programs/, one after the other, in one process.

    All must be for the same TPU: its cores and hosts.

    Returns:
      What failed in each of them, by its name; nothing if all passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        done = _pytest(
            f"--junitxml={report}",
            *(
                str(ROOT / "tests" / "emulation" / "programs" / f"{name}.py")
                for name in names
            ),
            seconds=seconds,
            **variables,
        )
        # A process that broke down leaves no report.
        cases = (
            list(ET.parse(report).iter("testcase")) if (report.exists()) else []
        )
    said = done.stdout[-4000:] + done.stderr[-2000:]
    return {
        name: _failed(
            [
                case
                for case in cases
                if case.get("classname").endswith(f".programs.{name}")
            ],
            said,
        )
        for name in names
    }


def _failed(cases, said: str) -> str:
    if not cases:
        return f"not one test was run:\n{said}"
    return "\n".join(
        f"{case.get('name')}:\n{found.text}"
        for case in cases
        for found in [*case.findall("failure"), *case.findall("error")]
    )
