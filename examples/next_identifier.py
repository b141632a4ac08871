"""Completes code: predicts the next identifier.

    python examples/next_identifier.py
    python examples/next_identifier.py --data=/path/to/my/python/files
    python examples/next_identifier.py --data=movielens
    python examples/next_identifier.py --mesh=2x2
    python examples/next_identifier.py --open_vocabulary
    python -m tf_layoutmap.local_cluster --ps 2 --workers 2 -- \
        python examples/next_identifier.py --cluster

The program reads the standard library of the running Python, and trains sharded
embedding tables and a small Keras tower. The program measures the model on
held-out files, and exports a model that TensorFlow serves without this package.
A second run resumes from the newest checkpoint, with the tower on any mesh or
on the host. With --open_vocabulary, a smaller model reads the files once, in
order, and assigns rows to identifiers during training. The result is compared
with the same model and a vocabulary that was counted before training. With
--cluster, the workers and parameter servers of TF_CONFIG train. After training,
this process measures and exports the saved model.
"""

from __future__ import annotations

import os
from pathlib import Path

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import logical_mesh
from completion.data.corpus import Corpus, DataError
from completion.report import Report
from completion.settings import Settings
from ending import in_a_sentence

_DEFAULTS = Settings()
_DATA = flags.DEFINE_string(
    "data",
    "stdlib",
    "'stdlib', 'movielens', or the path of a folder of Python files.",
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder of the checkpoints and the exported model. By default, a folder in "
    "the user's cache.",
)
_FRESH = flags.DEFINE_bool(
    "fresh", False, "Remove the checkpoints in --model_dir first."
)
_STEPS = flags.DEFINE_integer(
    "steps",
    None,
    "Total number of training steps. By default, four passes over the data, "
    "but at least 200 and at most 1,440 steps.",
    lower_bound=1,
)
_SAVE_EVERY = flags.DEFINE_integer(
    "save_every", 120, "Steps between checkpoints.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    _DEFAULTS.batch_size,
    "Positions in a training step.",
    lower_bound=1,
)
_SHARDS = flags.DEFINE_integer(
    "shards", _DEFAULTS.num_shards, "Shards of each table.", lower_bound=1
)
_MAX_HELD_OUT = flags.DEFINE_integer(
    "max_held_out",
    40_000,
    "Maximum number of held-out positions to measure on; a uniform sample.",
    lower_bound=1,
)
_MESH = flags.DEFINE_string(
    "mesh",
    None,
    "Mesh of the dense tower: logical CPUs along the axes batch and model, "
    "such as 2x2. The tables stay on the host.",
)
_OPEN = flags.DEFINE_bool(
    "open_vocabulary",
    False,
    "Compare an open with a closed vocabulary in one pass over the files. No "
    "checkpoint is written.",
)
_CAPACITY = flags.DEFINE_integer(
    "capacity",
    10_000,
    "With --open_vocabulary: number of identifiers of each table.",
    lower_bound=8,
)
_CLUSTER = flags.DEFINE_bool(
    "cluster",
    False,
    "Train on the parameter servers and workers of TF_CONFIG. All processes "
    "must have the same --model_dir.",
)
_SEED = flags.DEFINE_integer(
    "seed", _DEFAULTS.seed, "Seed of all random numbers.", lower_bound=0
)
flags.register_validator(
    "mesh", logical_mesh.is_shape, "must look like 2x2, each size 1 to 99."
)
flags.register_multi_flags_validator(
    ["open_vocabulary", "mesh"],
    lambda given: not (given["open_vocabulary"] and given["mesh"]),
    "--open_vocabulary does not support --mesh.",
)
flags.register_multi_flags_validator(
    ["cluster", "open_vocabulary", "mesh"],
    lambda given: (
        not given["cluster"] or not (given["open_vocabulary"] or given["mesh"])
    ),
    "--cluster does not support --open_vocabulary or --mesh.",
)


def read(data: str) -> Corpus:
    """Returns the corpus that --data selects."""
    from completion.data import movielens, python_source

    if data == "stdlib":
        return python_source.read_standard_library()
    if data == "movielens":
        return movielens.read_movielens()
    return python_source.read_folder(Path(data).expanduser())


def main(argv: list[str]) -> None:
    """Parses the flags and runs the example."""
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
        # The imports below take seconds. They follow the flag checks, so that
        # invalid flags are reported without delay.
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
