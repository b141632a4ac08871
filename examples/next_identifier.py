"""Learns to complete code: which identifier comes next?

    python examples/next_identifier.py
    python examples/next_identifier.py --data=/path/to/my/python/files
    python examples/next_identifier.py --data=movielens
    python examples/next_identifier.py --mesh=2x2
    python examples/next_identifier.py --open_vocabulary
    python -m tf_layoutmap.local_cluster --ps 2 --workers 2 -- \
        python examples/next_identifier.py --cluster

It reads the standard library of the Python that runs it, trains sharded
embedding tables and a small Keras tower, measures them on files it has not
seen, and exports a model that plain TensorFlow serves. Started again, it goes
on from its newest checkpoint, with its tower on any mesh or on none. With
--open_vocabulary a smaller model reads the files once, in their order, with
identifiers as strings and without counting them before, compared with itself
on a vocabulary that was counted. With --cluster the workers and parameter
servers of TF_CONFIG train; this process measures and exports what they saved.
"""

from __future__ import annotations

import os
from pathlib import Path

from absl import app, flags, logging

# Before TensorFlow is imported: its start-up notes say nothing of the model.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import logical_mesh
from completion.data.corpus import Corpus, DataError
from completion.report import Report
from completion.settings import Settings
from ending import in_a_sentence

_DEFAULTS = Settings()
_DATA = flags.DEFINE_string(
    "data", "stdlib", "'stdlib', 'movielens' or a folder of Python files."
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Where checkpoints and the exported model go; a folder "
    "in your cache unless told.",
)
_FRESH = flags.DEFINE_bool(
    "fresh", False, "Forget the checkpoints in --model_dir."
)
_STEPS = flags.DEFINE_integer(
    "steps",
    None,
    "Training steps in all; four times over the data unless "
    "told, within a few minutes.",
    lower_bound=1,
)
_SAVE_EVERY = flags.DEFINE_integer(
    "save_every", 120, "Steps between checkpoints.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", _DEFAULTS.batch_size, "Positions of a step.", lower_bound=1
)
_SHARDS = flags.DEFINE_integer(
    "shards", _DEFAULTS.num_shards, "Shards of each table.", lower_bound=1
)
_MAX_HELD_OUT = flags.DEFINE_integer(
    "max_held_out",
    40_000,
    "Held-out positions to measure on; more are drawn from evenly.",
    lower_bound=1,
)
_MESH = flags.DEFINE_string(
    "mesh",
    None,
    "Logical CPUs along the axes batch and model, such as 2x2, "
    "that the dense tower is sharded over; the tables stay with the host.",
)
_OPEN = flags.DEFINE_bool(
    "open_vocabulary",
    False,
    "Learn identifiers as they come, in the order "
    "of the files; no checkpoint is kept.",
)
_CAPACITY = flags.DEFINE_integer(
    "capacity",
    10_000,
    "With --open_vocabulary: identifiers of each table.",
    lower_bound=8,
)
_CLUSTER = flags.DEFINE_bool(
    "cluster",
    False,
    "Train over the parameter servers and workers of "
    "TF_CONFIG, which see --model_dir by the same name.",
)
_SEED = flags.DEFINE_integer(
    "seed", _DEFAULTS.seed, "Of everything that is drawn.", lower_bound=0
)
flags.register_validator(
    "mesh", logical_mesh.is_shape, "must look like 2x2, each size 1 to 99."
)
flags.register_multi_flags_validator(
    ["open_vocabulary", "mesh"],
    lambda given: not (given["open_vocabulary"] and given["mesh"]),
    "--open_vocabulary is not for a --mesh.",
)
flags.register_multi_flags_validator(
    ["cluster", "open_vocabulary", "mesh"],
    lambda given: (
        not given["cluster"] or not (given["open_vocabulary"] or given["mesh"])
    ),
    "--cluster is for tables without --open_vocabulary, and no --mesh.",
)


def read(data: str) -> Corpus:
    """Reads what --data asks for."""
    from completion.data import movielens, python_source

    if data == "stdlib":
        return python_source.read_standard_library()
    if data == "movielens":
        return movielens.read_movielens()
    return python_source.read_folder(Path(data).expanduser())


def main(argv: list[str]) -> None:
    """Reads, trains, measures, exports and shows."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.WARNING)
    settings = Settings(
        num_steps=_STEPS.value,
        batch_size=_BATCH_SIZE.value,
        num_shards=_SHARDS.value,
        seed=_SEED.value,
    )
    report = Report()
    with in_a_sentence(DataError):
        corpus = read(_DATA.value)
        # Only now, as it takes seconds: a wrong flag is answered at once.
        if _OPEN.value:
            from completion import stream_run

            stream_run.run(
                corpus,
                settings,
                report,
                capacity=_CAPACITY.value,
                max_held_out=_MAX_HELD_OUT.value,
            )
            return
        from completion import run

        run.run(
            corpus,
            settings,
            report,
            data=_DATA.value,
            model_dir=_MODEL_DIR.value,
            fresh=_FRESH.value,
            save_every=_SAVE_EVERY.value,
            max_held_out=_MAX_HELD_OUT.value,
            mesh=_MESH.value and logical_mesh.parse_shape(_MESH.value),
            servers=_CLUSTER.value,
        )


if __name__ == "__main__":
    app.run(main)
