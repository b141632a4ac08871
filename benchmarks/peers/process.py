"""Other libraries, each measured in a process of its own."""

import json
import os
import pathlib
import subprocess
from collections.abc import Mapping

from benchmarks import timing, workloads

_ROOT = pathlib.Path(__file__).parents[2]


class Peer:
    """A process that answers as `benchmarks/peers/fbgemm.py` does.

    It measures itself, so what it takes to ask is not counted.
    """

    def __init__(
        self,
        python: str,
        module: str,
        environment: Mapping[str, str] | None = None,
    ):
        """Starts the process.

        Args:
          python: The interpreter that has the other library.
          module: What it runs.
          environment: What it has beside the environment of this process.
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
        """Of the process."""
        return self._process.pid

    def open(
        self, workload: workloads.Workload, seeds: list[int]
    ) -> dict[str, str]:
        """Makes the tables of a workload; returns the peer's versions."""
        return self.ask("open", workload.name, seeds)

    def call(self, verb: str, batch: int) -> timing.Milliseconds:
        """Runs `verb` on a batch."""
        return timing.Milliseconds(self.ask(verb, batch))

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()

    def ask(self, *command):
        """Returns the answer to a command, as the peer's module says."""
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"The peer ended with {self._process.wait()}; what it printed "
                "is above."
            )
        return json.loads(answer)
