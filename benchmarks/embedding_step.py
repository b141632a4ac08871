"""Lookups and training steps of tables, compared with other libraries.

For each workload in `benchmarks/workloads.py`, the program measures a lookup
and a training step with Adagrad and constant gradients. All contestants process
the same ids in each round:

* `tlm`: `tlm.TPUEmbedding`, enqueue -> dequeue -> apply_gradients, with one
  RaggedTensor per feature.
* `packed`: `tlm.TPUEmbedding` with batches that `tlm.pack` has packed before
  the measurement.
* `tf`: `safe_embedding_lookup_sparse`, a tape, a sum over duplicate ids, and
  `ResourceSparseApplyAdagradV2`.
* `roof`: the hardware limit, a plain C++ loop. A lookup reads the row of every
  id and writes the sums. A step also sums the gradients of each distinct row,
  and updates the row and its row of the slot variable, in ascending order.
* `fbgemm`: FBGEMM's table-batched embedding on the CPU, and `bag`:
  `torch.nn.EmbeddingBag` with sparse gradients and `torch.optim.Adagrad`. Both
  run in one separate process, if `--torch_python` is set.
"""

import itertools

import numpy as np
import rich.table
from absl import flags

from benchmarks import step_contestants, timing, workloads
from benchmarks.peers import process as peers

_WORKLOADS = flags.DEFINE_multi_enum(
    "workloads",
    list(workloads.WORKLOADS),
    list(workloads.WORKLOADS),
    "Workloads of `embedding_step`.",
)
TORCH_PYTHON = flags.DEFINE_string(
    "torch_python",
    None,
    "Python interpreter with torch and fbgemm-gpu-cpu, to measure both.",
)

_PEERS = ("fbgemm", "bag")
_SEEDS = [11, 12, 13, 14]
_SHOWN = {"lookup": "lookup", "train": "training step"}


def measure(
    workload: workloads.Workload,
    rounds: int,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the milliseconds of each contestant, and library versions.

    The milliseconds are a dictionary with keys `<contestant>.<operation>`.
    """
    calls = step_contestants.contestants(
        workload, [workload.draw(seed) for seed in _SEEDS]
    )
    versions = {}
    if TORCH_PYTHON.value:
        peer = peers.Peer(TORCH_PYTHON.value, "benchmarks.peers.torch_tables")
        versions = peer.open(workload, _SEEDS)
        for name, verb in itertools.product(_PEERS, _SHOWN):
            calls[f"{name}.{verb}"] = lambda i, verb=verb, name=name: (
                timing.Milliseconds(peer.ask(verb, name, i % len(_SEEDS)))
            )
    times = timing.interleave(calls, rounds)
    if TORCH_PYTHON.value:
        peer.close()
    # The roof of a step is a lookup, which reads the row of every id, and an
    # update of each distinct row.
    times["roof.train"] = times["roof.lookup"] + times.pop("roof.update")
    return times, versions


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    others = [*(_PEERS if TORCH_PYTHON.value else ()), "tf"]
    shown = ("tlm", "packed", *others, "roof")
    ratios = [("packed", "roof"), *((other, "packed") for other in others)]
    table = rich.table.Table(
        title=f"Tables with Adagrad, {distribution} ids: ms, median (quartiles)"
    )
    table.add_column("")
    for name in (*shown, *(" / ".join(pair) for pair in ratios)):
        table.add_column(name, justify="right")
    figures = {}
    for name in _WORKLOADS.value:
        workload = workloads.WORKLOADS[name]
        if workload.distribution != distribution:
            continue
        times, versions = measure(workload, rounds)
        figures[name] = {
            "workload": str(workload),
            "versions": versions,
            "milliseconds": {
                call: _summary(values) for call, values in sorted(times.items())
            },
        }
        for verb, called in _SHOWN.items():
            table.add_row(
                f"{name}: {called}",
                *(
                    _shown(times[f"{contestant}.{verb}"])
                    for contestant in shown
                ),
                *(_ratio(times, verb, *pair) for pair in ratios),
            )
    return table, figures


def _ratio(
    times: dict[str, np.ndarray], verb: str, above: str, below: str
) -> str:
    """Returns the median, over all rounds, of the ratio in each round."""
    ratios = times[f"{above}.{verb}"] / times[f"{below}.{verb}"]
    return f"{np.median(ratios):.2f}"


def _summary(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": middle, "quartiles": [low, high]}


def _shown(values: np.ndarray) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"
