"""A process that measures another library."""

import json
import os
import pathlib
import subprocess
from collections.abc import Mapping

from benchmarks import timing, workloads

_ROOT = pathlib.Path(__file__).parents[2]


class Peer:
    """Runs a program of `benchmarks/peers` in a new process.

    The program measures its own times, which do not include the communication
    with this process.
    """

    def __init__(
        self,
        python: str,
        module: str,
        environment: Mapping[str, str] | None = None,
    ):
        """Starts the process.

        Args:
          python: Path of the Python interpreter that has the other library.
          module: Name of the module to run.
          environment: Environment variables of the new process, in addition to
            the variables of the current process.
        """
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def open(
        self, workload: workloads.Workload, seeds: list[int]
    ) -> dict[str, str]:
        """Creates the tables of a workload and returns library versions."""
        return self.ask("open", workload.name, seeds)

    def call(self, verb: str, batch: int) -> timing.Milliseconds:
        """Runs the command `verb` on a batch and returns its duration."""
        return timing.Milliseconds(self.ask(verb, batch))

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()

    def ask(self, *command):
        """Sends a command to the process and returns the result."""
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"The peer exited with code {self._process.wait()}. Its output "
                "is above."
            )
        return json.loads(answer)
