"""Runs benchmarks and prints their results as tables."""

import gc
import json
import os
import pathlib
import platform

import rich.console
import tensorflow as tf
from absl import app, flags

import tf_layoutmap as tlm
from benchmarks import (
    embedding_step,
    growth,
    mesh_embedding,
    model_creation,
    open_vocabulary,
    picture,
    serving,
    sharded_embedding,
    sharded_variable,
    workloads,
)
from benchmarks.cluster import processor_time
from benchmarks.cluster import report as cluster
from benchmarks.vocabularies import peers
from benchmarks.whole_models import (
    criteo_dlrm,
    dlrm,
    evaluation,
    mesh_counts,
    mesh_models,
    replaced_embeddings,
    start_up,
    table_creation,
)

_ROUNDS = flags.DEFINE_integer(
    "rounds", 15, "Number of timed calls of each contestant.", lower_bound=1
)
_JSON = flags.DEFINE_string(
    "json",
    None,
    "Output file for all results, in milliseconds, with versions and machine.",
)
_PICTURE = flags.DEFINE_string(
    "picture", None, "Output file for a bar chart of `embedding_step`, in SVG."
)

_DISTRIBUTIONS = flags.DEFINE_multi_enum(
    "distributions",
    workloads.DISTRIBUTIONS,
    workloads.DISTRIBUTIONS,
    "Distributions of the ids.",
)

_BENCHMARKS = {
    "cluster": cluster.report,
    "cluster_processor_time": processor_time.report,
    "criteo_dlrm": criteo_dlrm.report,
    "dlrm": dlrm.report,
    "embedding_step": embedding_step.report,
    "growth": growth.report,
    "mesh_embedding": mesh_embedding.report,
    "mesh_counts": mesh_counts.report,
    "mesh_models": mesh_models.report,
    "model_creation": model_creation.report,
    "open_vocabulary": open_vocabulary.report,
    "open_vocabulary_peers": peers.report,
    "evaluation": evaluation.report,
    "replaced_embeddings": replaced_embeddings.report,
    "serving": serving.report,
    "sharded_embedding": sharded_embedding.report,
    "sharded_variable": sharded_variable.report,
    "start_up": start_up.report,
    "table_creation": table_creation.report,
}


def main(argv: list[str]) -> None:
    names = argv[1:] or list(_BENCHMARKS)
    unknown = [name for name in names if name not in _BENCHMARKS]
    if unknown:
        raise app.UsageError(
            f"Benchmarks must be in {sorted(_BENCHMARKS)}. Received: {unknown}."
        )
    console = rich.console.Console(width=100)
    about = {
        "tf_layoutmap": tlm.__version__,
        "tensorflow": tf.__version__,
        "machine": _machine(),
        "rounds": _ROUNDS.value,
    }
    title = (
        f"tf_layoutmap {tlm.__version__}, TensorFlow {tf.__version__}, "
        f"{about['machine']}; {_ROUNDS.value} interleaved rounds"
    )
    console.print(title)
    medians = {}
    for name in names:
        for distribution in _DISTRIBUTIONS.value:
            table, medians[f"{name}/{distribution}"] = _BENCHMARKS[name](
                distribution, _ROUNDS.value
            )
            console.print(table)
            # Frees the models, which contain reference cycles. Some models
            # take 13 GB of memory.
            gc.collect()
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(
            json.dumps({"about": about, "measured": medians}, indent=2)
        )
    if _PICTURE.value:
        steps = {
            name: figure
            for key, figures in medians.items()
            if key.startswith("embedding_step/")
            for name, figure in figures.items()
        }
        pathlib.Path(_PICTURE.value).write_text(picture.svg(steps, title))


def _machine() -> str:
    """Returns the names of the processors, if known, and the core count."""
    info = pathlib.Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return f"{(names or [platform.machine()])[0]}, {os.cpu_count()} cores"


if __name__ == "__main__":
    app.run(main)
