"""Network traffic and memory of tables that are sharded over processes.

    python -m benchmarks.process_sharded_tables [--processes 2 4]

The program starts three groups of processes on this machine: with replicated
tables, with sharded tables, and with sharded tables and folded gradients. All
processes of a group train on parts of the same global batch. For each group,
the program prints the bytes on the loopback interface per process and step. The
program also prints how much memory the first process uses for tables and steps,
and how much more it uses during a save. No other program may use the loopback
interface during the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

WAYS = {
    "replicated": {},
    "exact": {"over_processes": "sharded"},
    "local": {"over_processes": "sharded", "gradient_aggregation": "local"},
}

NUM_TABLES = 8
NUM_ROWS = 200_000
DIM = 32
GLOBAL_BATCH = 4_096
NUM_STEPS = 5


def run_process(way: str, ids_per_sample: int) -> None:
    """Runs one process of a group; process 0 also prints the results."""
    import numpy as np
    import tensorflow as tf

    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    task = json.loads(os.environ["TF_CONFIG"])
    worker, size = task["task"]["index"], len(task["cluster"]["worker"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    before = memory()
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            [
                tpu.FeatureConfig(
                    tpu.TableConfig(
                        NUM_ROWS,
                        DIM,
                        tf.zeros_initializer(),
                        name=f"table_{number}",
                    )
                )
                for number in range(NUM_TABLES)
            ],
            tpu.Adagrad(0.1),
            **WAYS[way],
        )
    rng = np.random.default_rng(worker)
    num_samples = GLOBAL_BATCH // size
    # Hashed ids are typical of training data. A permutation of the rows has the
    # same effect: frequent ids are spread over the table.
    places = np.random.default_rng(0).permutation(NUM_ROWS)
    ids = places[
        np.minimum(
            rng.zipf(1.2, [NUM_TABLES, num_samples, ids_per_sample]), NUM_ROWS
        )
        - 1
    ]

    def replica(*features):
        embedding.enqueue(list(features))
        activations = embedding.dequeue()
        embedding.apply_gradients(
            [tf.ones_like(activation) for activation in activations]
        )

    step = tf.function(lambda *args: strategy.run(replica, args))
    features = [tf.constant(feature_ids) for feature_ids in ids]
    step(*features)  # Traces the function.
    first = loopback_bytes()
    for _ in range(NUM_STEPS):
        step(*features)
    sent = (loopback_bytes() - first) / NUM_STEPS / size
    held = memory()
    # Resets the peak that `peak_memory` returns.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    with tempfile.TemporaryDirectory() as folder:
        tf.train.Checkpoint(embedding=embedding).write(f"{folder}/saved")
    if worker == 0:
        print(
            "FOUND "
            + json.dumps(
                {
                    "way": way,
                    "processes": size,
                    "ids of a sample": ids_per_sample,
                    "MB per process and step": round(sent / 1e6, 3),
                    "MB of memory": round((held - before) / 1e6),
                    "MB more while it saves": round(
                        (peak_memory() - held) / 1e6
                    ),
                }
            ),
            flush=True,
        )


def memory() -> int:
    """Returns the resident memory of this process, in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """Returns the peak of the resident memory in bytes, since the last reset.

    `run_process` resets the peak.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def loopback_bytes() -> int:
    """Returns the number of bytes that the loopback interface has received."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise RuntimeError("There is no loopback interface in /proc/net/dev.")


def run_group(way: str, size: int, ids_per_sample: int) -> str:
    """Runs a group of processes and returns the results of process 0."""
    from tf_layoutmap.local_cluster import free_ports

    addresses = [f"localhost:{port}" for port in free_ports(size)]
    with tempfile.TemporaryFile("w+") as log:
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.process_sharded_tables",
                    "--as_process",
                    way,
                    f"--ids_per_sample={ids_per_sample}",
                ],
                stdout=log if index == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": {"worker": addresses},
                            "task": {"type": "worker", "index": index},
                        }
                    ),
                },
            )
            for index in range(size)
        ]
        try:
            for worker in workers:
                worker.wait(150)
        finally:
            for worker in workers:
                worker.kill()
        log.seek(0)
        lines = [line for line in log if line.startswith("FOUND ")]
    return (
        lines[0].removeprefix("FOUND ").strip()
        if lines
        else (f"{way}, {size} processes: failed")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--ids_per_sample", type=int, default=1)
    parser.add_argument("--as_process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_process:
        run_process(options.as_process, options.ids_per_sample)
        return
    for size in options.processes:
        for way in options.ways:
            print(run_group(way, size, options.ids_per_sample), flush=True)


if __name__ == "__main__":
    main()
