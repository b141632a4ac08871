"""Runs benchmarks and prints figures, compared with the roof and others."""

import json
import pathlib
import platform

import rich.console
import tensorflow as tf
from absl import app, flags

import tf_layoutmap as tlm
from benchmarks import (
    embedding_step,
    mesh_embedding,
    model_creation,
    serving,
    sharded_embedding,
    sharded_variable,
    workloads,
)

_ROUNDS = flags.DEFINE_integer(
    "rounds", 15, "How often each contestant is timed.", lower_bound=1)
_JSON = flags.DEFINE_string(
    "json", None, "A file that gets the medians, in milliseconds.")

_DISTRIBUTIONS = flags.DEFINE_multi_enum(
    "distributions", workloads.DISTRIBUTIONS, workloads.DISTRIBUTIONS,
    "How ids are drawn.")

_BENCHMARKS = {"embedding_step": embedding_step.report,
               "mesh_embedding": mesh_embedding.report,
               "model_creation": model_creation.report,
               "serving": serving.report,
               "sharded_embedding": sharded_embedding.report,
               "sharded_variable": sharded_variable.report}


def main(argv: list[str]) -> None:
    names = argv[1:] or list(_BENCHMARKS)
    unknown = [name for name in names if name not in _BENCHMARKS]
    if unknown:
        raise app.UsageError(
            f"Benchmarks are {sorted(_BENCHMARKS)}. Received: {unknown}.")
    console = rich.console.Console(width=100)
    console.print(
        f"tf_layoutmap {tlm.__version__}, TensorFlow {tf.__version__}, "
        f"{platform.machine()}; medians of {_ROUNDS.value} interleaved rounds")
    medians = {}
    for name in names:
        for distribution in _DISTRIBUTIONS.value:
            table, medians[f"{name}/{distribution}"] = _BENCHMARKS[name](
                distribution, _ROUNDS.value)
            console.print(table)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(medians, indent=2))


if __name__ == "__main__":
    app.run(main)
