"""`python -m tf_layoutmap advise`: reports what `shard_embeddings` would do."""

import argparse
import functools
import json
import pathlib
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from tf_layoutmap.layers.embedding_replacement import shard_embeddings
from tf_layoutmap.planning import command


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of the command, or exits with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_layoutmap advise",
        description="Prints which Embedding layers of a model "
        "tlm.layers.shard_embeddings would replace, and the effect. Changes "
        "nothing.",
    )
    parser.add_argument(
        "model",
        help="A .keras file, or module:function with a function without "
        "arguments that returns a model.",
    )
    parser.add_argument(
        "--min-rows",
        type=int,
        default=1_000,
        help="Tables with fewer rows are not replaced (default: 1000).",
    )
    parser.add_argument(
        "--optimizer",
        choices=("model", "adagrad", "sgd"),
        default="model",
        help="Optimizer of the replaced tables (default: model, the optimizer "
        "of the model).",
    )
    parser.add_argument(
        "--ids-per-step",
        type=int,
        default=2048,
        help="Number of ids that a step looks up in each table (default: "
        "2048).",
    )
    parser.add_argument(
        "--replace-regularized",
        action="store_true",
        help="Also replaces layers with a regularizer or a constraint, which "
        "is then applied to the rows of a batch.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Prints the report as JSON."
    )
    return parser.parse_args(arguments)


def find_model(target: str) -> Callable[[], Any]:
    """Returns a function that returns the model of `target`.

    Args:
      target: Path of a `.keras` file, or `module:function` with a function
        without required arguments. Modules of the current directory can be
        imported.

    Raises:
      ValueError: If `target` is neither of both, or if the file is not a model.
      FileNotFoundError: If the file does not exist.
    """
    if target.endswith(".keras"):
        return _find_file(pathlib.Path(target))
    if ":" not in target:
        raise ValueError(
            "The model must be a .keras file or module:function. Received: "
            f"{target!r}."
        )
    return command.find_function(target)


def _find_file(path: pathlib.Path) -> Callable[[], Any]:
    if not path.is_file():
        raise FileNotFoundError(f"The model file does not exist: {path}.")
    try:
        with zipfile.ZipFile(path) as archive:
            metadata = json.loads(archive.read("metadata.json"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(
            "The model must be a file that `model.save` of Keras wrote. "
            f"Received: {path} ({error})."
        ) from error
    if metadata["keras_version"].startswith("2."):
        import tf_keras

        return functools.partial(tf_keras.models.load_model, path)
    import keras

    return functools.partial(keras.models.load_model, path)


def main(arguments: Sequence[str]) -> int:
    """Prints the report of a model and returns the exit status.

    The status is 1 if the model is not found.
    """
    options = read_arguments(arguments)
    try:
        create = find_model(options.model)
    except (OSError, ValueError) as error:
        return command.failed(error)
    # Errors of the function have a traceback.
    report = shard_embeddings(
        create(),
        min_rows=options.min_rows,
        optimizer=options.optimizer,
        replace_regularized=options.replace_regularized,
        ids_per_step=options.ids_per_step,
        dry_run=True,
    )
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        report.print()
    return 0
