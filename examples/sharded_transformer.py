"""Trains a Transformer that is sharded over a mesh, in plain Keras.

    python examples/sharded_transformer.py
    python examples/sharded_transformer.py --mesh=1x4 --data=/path/to/files

The program reads the standard library of the running Python as characters and
learns to predict the next character. Attention heads, MLPs and embeddings are
sharded over the mesh axis "model", and batches over "batch". The mesh consists
of logical CPUs, so the program runs on any machine. The program uses Keras' own
`compile`, `fit` and `evaluate`, and saves Keras files. A second run resumes
from the model that was saved last, on any mesh.
"""

from __future__ import annotations

import os

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported. This level hides errors
# that TensorFlow's graph optimizer logs about the shapes in DTensor's graphs.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import logical_mesh
from completion.data.corpus import DataError
from completion.report import Report
from ending import in_a_sentence
from transformer.settings import Settings, SettingsError

_DEFAULTS = Settings()
_DATA = flags.DEFINE_string(
    "data", "stdlib", "'stdlib', or the path of a folder of Python files."
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder in which the model is saved after each epoch. By default, a folder "
    "in the user's cache.",
)
_FRESH = flags.DEFINE_bool(
    "fresh", False, "Remove the models saved in --model_dir first."
)
_MESH = flags.DEFINE_string(
    "mesh", "2x2", "Mesh of logical CPUs: sizes of the axes batch and model."
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", _DEFAULTS.epochs, "Total number of epochs.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
    "steps",
    _DEFAULTS.steps_per_epoch,
    "Training steps in an epoch.",
    lower_bound=1,
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    _DEFAULTS.batch_size,
    "Windows in a training step.",
    lower_bound=1,
)
_CONTEXT = flags.DEFINE_integer(
    "context", _DEFAULTS.context, "Characters in a window.", lower_bound=2
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
    "sample", 160, "Characters to generate after each prompt.", lower_bound=0
)
_SEED = flags.DEFINE_integer(
    "seed", _DEFAULTS.seed, "Seed of all random numbers.", lower_bound=0
)
flags.register_validator(
    "mesh", logical_mesh.is_shape, "must look like 2x2, each size 1 to 99."
)


def main(argv: list[str]) -> None:
    """Parses the flags and runs the example."""
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
        # This import takes seconds. It follows the flag checks, so that invalid
        # flags are reported without delay.
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
