"""Runs test modules in separate processes.

The emulation registers kernels for TensorFlow's ops permanently, so it must not
be enabled in the process of other tests. Each process emulates one TPU.
"""

import os
import pathlib
import tempfile
import xml.etree.ElementTree as ET

from tests import forked_process

ROOT = pathlib.Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Returns an environment in which this checkout can be imported."""
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
    """Runs a file below tests/ with pytest; raises an error if a test fails.

    `variables` are set in the environment of the process.
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
    *names: str,
    marks: str = "not exhaustive",
    keyword: str = "",
    seconds: int = 900,
    **variables: str,
) -> dict[str, str]:
    """Runs several files of programs/ one after the other in one process.

    All files must use a TPU with the same numbers of cores and hosts.

    Args:
      *names: Names of the files.
      marks: Expression that selects test cases by their marks.
      keyword: Expression that selects test cases by their names.
      seconds: Timeout in seconds.
      **variables: Environment variables of the process.

    Returns:
      The failures by file. The text is empty if all tests of the file passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        done = _pytest(
            f"--junitxml={report}",
            f"-m={marks}",
            f"-k={keyword}",
            *(
                str(ROOT / "tests" / "emulation" / "programs" / f"{name}.py")
                for name in names
            ),
            seconds=seconds,
            **variables,
        )
        # A process that crashed does not write a report.
        cases = (
            list(ET.parse(report).iter("testcase")) if (report.exists()) else []
        )
    output = done.stdout[-4000:] + done.stderr[-2000:]
    return {
        name: _failed(
            [
                case
                for case in cases
                if case.get("classname").endswith(f".programs.{name}")
            ],
            output,
        )
        for name in names
    }


def _failed(cases, output: str) -> str:
    if not cases:
        return f"no test was run:\n{output}"
    return "\n".join(
        f"{case.get('name')}:\n{found.text}"
        for case in cases
        for found in [*case.findall("failure"), *case.findall("error")]
    )
