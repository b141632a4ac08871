"""Predicts click-through rates: DLRM on Criteo files, in plain Keras.

    python examples/dlrm.py
    python examples/dlrm.py --data=/path/to/train.txt --max_lines=2000000
    python examples/dlrm.py --replicas=2
    python examples/dlrm.py --open_vocabulary
    python -m tf_layoutmap.local_cluster --ps 2 --workers 2 -- \
        python examples/dlrm.py --cluster

Without --data it makes a small file of that format: skewed values, blanks,
and clicks drawn from planted chances. 26 tables are trained by their own
optimizers in `tlm.layers.TPUEmbedding`, the towers by Keras; `compile`,
`fit`, `predict` and saving are Keras' own. The exported model takes lines of
the file and serves from plain TensorFlow. Started again, it goes on from the
model it saved last, with any number of replicas. With --cluster the tables are
on the parameter servers of TF_CONFIG, and its workers train; what they have
saved is then measured and exported by this process alone.
"""

from __future__ import annotations

import os

from absl import app, flags, logging

# Before TensorFlow is imported: its start-up notes say nothing of the model.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from clicks.settings import Settings
from completion.data.corpus import DataError
from completion.report import Report
from ending import in_a_sentence

_DEFAULTS = Settings()
_DATA = flags.DEFINE_string(
    "data",
    None,
    "A file as Criteo's train.txt: label, 13 integers and 26 "
    "categories between tabs. A made-up one unless told.",
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Where models are saved, and the made-up file; a "
    "folder in your cache unless told.",
)
_FRESH = flags.DEFINE_bool(
    "fresh", False, "Forget the models saved in --model_dir."
)
_MAX_LINES = flags.DEFINE_integer(
    "max_lines", 120_000, "Lines to read, or to make up.", lower_bound=16
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", _DEFAULTS.epochs, "Passes over the training lines.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", _DEFAULTS.batch_size, "Lines of a step.", lower_bound=1
)
_DIM = flags.DEFINE_integer(
    "dim", _DEFAULTS.dim, "Width of the rows.", lower_bound=1
)
_MAX_ROWS = flags.DEFINE_integer(
    "max_rows",
    _DEFAULTS.max_rows,
    "Rows of a table at most; more values than that share them.",
    lower_bound=2,
)
_OPEN = flags.DEFINE_bool(
    "open_vocabulary",
    False,
    "Take the hexadecimal values as keys, which get "
    "rows as they come, instead of hashing them to rows.",
)
_CAPACITY = flags.DEFINE_integer(
    "capacity",
    10_000,
    "With --open_vocabulary: keys of each table.",
    lower_bound=8,
)
_REPLICAS = flags.DEFINE_integer(
    "replicas",
    1,
    "Logical CPUs that share each batch; the tables stay one.",
    lower_bound=1,
    upper_bound=16,
)
_CLUSTER = flags.DEFINE_bool(
    "cluster",
    False,
    "Train over the parameter servers and workers of "
    "TF_CONFIG, which see --data and --model_dir by the same names.",
)
_SEED = flags.DEFINE_integer(
    "seed", _DEFAULTS.seed, "Of everything that is drawn.", lower_bound=0
)
flags.register_multi_flags_validator(
    ["batch_size", "replicas"],
    lambda given: given["batch_size"] % given["replicas"] == 0,
    "--batch_size must be a multiple of --replicas.",
)
flags.register_multi_flags_validator(
    ["open_vocabulary", "replicas"],
    lambda given: not given["open_vocabulary"] or given["replicas"] == 1,
    "--open_vocabulary needs --replicas=1: Keras does not divide strings.",
)
flags.register_multi_flags_validator(
    ["cluster", "open_vocabulary", "replicas"],
    lambda given: (
        not given["cluster"]
        or (given["replicas"] == 1 and not given["open_vocabulary"])
    ),
    "--cluster is for --replicas=1 without --open_vocabulary.",
)


def main(argv: list[str]) -> None:
    """Reads, trains, measures, exports and shows."""
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
        # Only now, as it takes seconds: a wrong flag is answered at once.
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
