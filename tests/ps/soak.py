"""Trains for a long time while workers are killed. Not part of `make test`.

python -m tests.ps.soak --minutes=30 --kill_every=60

The cluster has two servers and two workers. A Keras model learns synthetic
clicks by `fit`. The program kills and restarts a worker at regular intervals.
During training, the program prints the memory of each process. At the end, it
prints the held-out metrics. For comparison, it also prints the metrics of a run
with the same number of steps and without failures.
"""

import collections
import json
import pathlib
import statistics
import tempfile
import time

from absl import app, flags

from tests.ps.cluster import Cluster
from tests.ps.soak_program import START_SECONDS

_MINUTES = flags.DEFINE_float("minutes", 30.0, "How long workers die.")
_KILL_EVERY = flags.DEFINE_float(
    "kill_every", 60.0, "Seconds between two deaths."
)
_REST = flags.DEFINE_float(
    "rest",
    0.0,
    "Seconds of rest after each epoch while workers die, so that "
    "the quiet run of as many steps takes less time.",
)
_SAMPLE_SECONDS = 10


class Memory:
    """Resident memory of each process over time, in MB."""

    def __init__(self):
        self.samples = collections.defaultdict(list)
        self.began = time.monotonic()

    def take(self, cluster: Cluster):
        row = []
        for name, process in cluster.processes.items():
            try:
                lines = (
                    pathlib.Path(f"/proc/{process.pid}/status")
                    .read_text()
                    .splitlines()
                )
            except FileNotFoundError:
                continue
            rss = [
                int(line.split()[1]) / 1024
                for line in lines
                if line.startswith("VmRSS:")
            ]
            if rss:
                self.samples[name].append(rss[0])
                row.append(f"{name[0]} {name[1]}: {rss[0]:.0f}")
        print(
            f"{time.monotonic() - self.began:6.0f} s  MB of " + ", ".join(row),
            flush=True,
        )

    def report(self):
        for (job, index), samples in self.samples.items():
            quarter = max(1, len(samples) // 4)
            early = statistics.median(samples[quarter : 2 * quarter] or samples)
            late = statistics.median(samples[-quarter:])
            print(
                f"{job} {index}: {early:.0f} MB in the second quarter, "
                f"{late:.0f} in the last ({late / early - 1:+.1%})"
            )


def run(num_steps: int | None) -> dict:
    """Runs one training. Kills workers if `num_steps` is None."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(pathlib.Path(folder)) as cluster,
    ):
        rest = 0.0 if num_steps else _REST.value
        cluster.train(
            str(num_steps or 0), str(rest), module="tests.ps.soak_program"
        )
        cluster.wait_for("DONE", START_SECONDS)
        memory, deaths = Memory(), 0
        end = memory.began + _MINUTES.value * 60
        next_death = memory.began + _KILL_EVERY.value
        while True:
            time.sleep(_SAMPLE_SECONDS)
            memory.take(cluster)
            text = cluster.log("chief").read_text(errors="replace")
            if "FOUND " in text:
                break
            assert cluster.processes["chief", 0].poll() is None, text[-3000:]
            if num_steps is None and time.monotonic() > end:
                break
            if num_steps is None and time.monotonic() > next_death:
                cluster.restart("worker", deaths % 2, START_SECONDS)
                deaths += 1
                next_death += _KILL_EVERY.value
        found = {**cluster.finish(START_SECONDS), "deaths": deaths}
        memory.report()
        return found


def main(argv: list[str]):
    del argv
    killed = run(None)
    print("with deaths:", json.dumps(killed), flush=True)
    quiet = run(killed["num_steps"])
    print("quiet:", json.dumps(quiet), flush=True)


if __name__ == "__main__":
    app.run(main)
