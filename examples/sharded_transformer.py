"""A Transformer whose weights are cut over a mesh, in plain Keras.

    python examples/sharded_transformer.py
    python examples/sharded_transformer.py --mesh=1x4 --data=/path/to/files

It reads the standard library of the Python that runs it as characters and
learns which comes next. Attention heads, MLPs and embeddings are sharded over
the mesh axis "model", batches over "batch"; the mesh is made of logical CPUs,
so it runs anywhere. `compile`, `fit`, `evaluate` and saving are Keras' own.
Started again, it goes on from the model it saved last, on any mesh.
"""

from __future__ import annotations

import os

from absl import app, flags, logging

# Before TensorFlow is imported. Its graph optimizer takes the shapes of
# DTensor's graphs for errors, and prints a page of them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import logical_mesh
from completion.data.corpus import DataError
from completion.report import Report
from ending import in_a_sentence
from transformer.settings import Settings, SettingsError

_DEFAULTS = Settings()
_DATA = flags.DEFINE_string(
    "data", "stdlib", "'stdlib' or a folder of Python files."
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Where the model is saved after each epoch; a folder "
    "in your cache unless told.",
)
_FRESH = flags.DEFINE_bool(
    "fresh", False, "Forget the models saved in --model_dir."
)
_MESH = flags.DEFINE_string(
    "mesh", "2x2", "Logical CPUs along the axes batch and model."
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", _DEFAULTS.epochs, "Epochs in all.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
    "steps",
    _DEFAULTS.steps_per_epoch,
    "Training steps of an epoch.",
    lower_bound=1,
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", _DEFAULTS.batch_size, "Windows of a step.", lower_bound=1
)
_CONTEXT = flags.DEFINE_integer(
    "context", _DEFAULTS.context, "Characters of a window.", lower_bound=2
)
_DIM = flags.DEFINE_integer(
    "dim", _DEFAULTS.dim, "Width of the model.", lower_bound=1
)
_HEADS = flags.DEFINE_integer(
    "heads", _DEFAULTS.num_heads, "Attention heads.", lower_bound=1
)
_BLOCKS = flags.DEFINE_integer(
    "blocks",
    _DEFAULTS.num_blocks,
    "Blocks of attention and MLP.",
    lower_bound=1,
)
_WINDOWS = flags.DEFINE_integer(
    "windows", 1024, "Held-out windows to measure on.", lower_bound=1
)
_SAMPLE = flags.DEFINE_integer(
    "sample", 160, "Characters to make up after each prompt.", lower_bound=0
)
_SEED = flags.DEFINE_integer(
    "seed", _DEFAULTS.seed, "Of everything that is drawn.", lower_bound=0
)
flags.register_validator(
    "mesh", logical_mesh.is_shape, "must look like 2x2, each size 1 to 99."
)


def main(argv: list[str]) -> None:
    """Reads, trains, measures and shows."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    settings = Settings(
        mesh=logical_mesh.parse_shape(_MESH.value),
        context=_CONTEXT.value,
        dim=_DIM.value,
        num_heads=_HEADS.value,
        num_blocks=_BLOCKS.value,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        steps_per_epoch=_STEPS.value,
        seed=_SEED.value,
    )
    report = Report()
    with in_a_sentence(DataError, SettingsError):
        settings.check()
        # Only now, as it takes seconds: a wrong flag is answered at once.
        from transformer import run

        run.run(
            report,
            settings,
            data=_DATA.value,
            model_dir=_MODEL_DIR.value,
            fresh=_FRESH.value,
            num_windows=_WINDOWS.value,
            sample_length=_SAMPLE.value,
        )


if __name__ == "__main__":
    app.run(main)
