"""Predicts click-through rates: DLRM on Criteo files, in plain Keras.

    python examples/dlrm.py
    python examples/dlrm.py --data=/path/to/train.txt --max_lines=2000000
    python examples/dlrm.py --replicas=2
    python examples/dlrm.py --open_vocabulary
    python -m tf_layoutmap.local_cluster --ps 2 --workers 2 -- \
        python examples/dlrm.py --cluster

Without --data, the program generates a small synthetic file of the same format:
skewed values, blanks, and clicks drawn from known probabilities. Adagrad trains
the 26 tables of a `tlm.layers.TPUEmbedding`, and Adam trains the bottom and top
MLP. The program uses Keras' own `compile`, `fit` and `predict`, and saves Keras
files. The exported model maps lines of the file to click probabilities with
TensorFlow alone. A second run resumes from the model that was saved last, with
any number of replicas. With --cluster, the parameter servers of TF_CONFIG store
the tables, and the workers train. After training, this process measures and
exports the saved model.
"""

from __future__ import annotations

import os

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from clicks.settings import Settings
from completion.data.corpus import DataError
from completion.report import Report
from ending import in_a_sentence

_DEFAULTS = Settings()
_DATA = flags.DEFINE_string(
    "data",
    None,
    "File in the format of Criteo's train.txt: label, 13 integers and 26 "
    "categories, separated by tabs. By default, a synthetic file.",
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder of the saved models and of the synthetic file. By default, a "
    "folder in the user's cache.",
)
_FRESH = flags.DEFINE_bool(
    "fresh", False, "Remove the models saved in --model_dir first."
)
_MAX_LINES = flags.DEFINE_integer(
    "max_lines",
    120_000,
    "Maximum number of lines to read, or to generate.",
    lower_bound=16,
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", _DEFAULTS.epochs, "Passes over the training lines.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    _DEFAULTS.batch_size,
    "Lines in a training step.",
    lower_bound=1,
)
_DIM = flags.DEFINE_integer(
    "dim", _DEFAULTS.dim, "Width of the embedding rows.", lower_bound=1
)
_MAX_ROWS = flags.DEFINE_integer(
    "max_rows",
    _DEFAULTS.max_rows,
    "Maximum number of rows of a table; values are hashed to rows.",
    lower_bound=2,
)
_OPEN = flags.DEFINE_bool(
    "open_vocabulary",
    False,
    "Use the hexadecimal values as keys that get rows during training, instead "
    "of hashing them to rows.",
)
_CAPACITY = flags.DEFINE_integer(
    "capacity",
    10_000,
    "With --open_vocabulary: number of keys of each table.",
    lower_bound=8,
)
_REPLICAS = flags.DEFINE_integer(
    "replicas",
    1,
    "Logical CPUs that share each batch; there is one copy of the tables.",
    lower_bound=1,
    upper_bound=16,
)
_CLUSTER = flags.DEFINE_bool(
    "cluster",
    False,
    "Train on the parameter servers and workers of TF_CONFIG. All processes "
    "must have the same --data and --model_dir.",
)
_SEED = flags.DEFINE_integer(
    "seed", _DEFAULTS.seed, "Seed of all random numbers.", lower_bound=0
)
flags.register_multi_flags_validator(
    ["batch_size", "replicas"],
    lambda given: given["batch_size"] % given["replicas"] == 0,
    "--batch_size must be a multiple of --replicas.",
)
flags.register_multi_flags_validator(
    ["open_vocabulary", "replicas"],
    lambda given: not given["open_vocabulary"] or given["replicas"] == 1,
    "--open_vocabulary requires --replicas=1: Keras does not split batches of "
    "strings.",
)
flags.register_multi_flags_validator(
    ["cluster", "open_vocabulary", "replicas"],
    lambda given: (
        not given["cluster"]
        or (given["replicas"] == 1 and not given["open_vocabulary"])
    ),
    "--cluster requires --replicas=1 and does not support --open_vocabulary.",
)


def main(argv: list[str]) -> None:
    """Parses the flags and runs the example."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    settings = Settings(
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        dim=_DIM.value,
        max_rows=_MAX_ROWS.value,
        seed=_SEED.value,
        capacity=_CAPACITY.value if _OPEN.value else None,
    )
    report = Report()
    with in_a_sentence(DataError):
        # This import takes seconds. It follows the flag checks, so that invalid
        # flags are reported without delay.
        from clicks import run

        run.run(
            report,
            settings,
            data=_DATA.value,
            model_dir=_MODEL_DIR.value,
            fresh=_FRESH.value,
            max_lines=_MAX_LINES.value,
            replicas=_REPLICAS.value,
            cluster=_CLUSTER.value,
        )


if __name__ == "__main__":
    app.run(main)
