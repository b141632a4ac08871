"""`python -m tf_layoutmap advise`: reports what `shard_embeddings` would do."""

import argparse
import importlib
import json
import pathlib
import sys
import zipfile
from collections.abc import Sequence
from typing import Any

from tf_layoutmap.layers.embedding_replacement import shard_embeddings


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
        "--batch-ids",
        type=int,
        default=2048,
        help="Number of ids that a step looks up in each table (default: "
        "2048).",
    )
    parser.add_argument(
        "--rules-by-row",
        action="store_true",
        help="Also replaces layers with a regularizer or a constraint, which "
        "is then applied to the rows of a batch.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Prints the report as JSON."
    )
    return parser.parse_args(arguments)


def load_model(target: str) -> Any:
    """Returns the model of a `.keras` file or of `module:function`.

    Args:
      target: Path of a file, or the module and name of a function without
        arguments. Modules of the current directory can be imported.

    Raises:
      ValueError: If `target` is neither of both.
      FileNotFoundError: If the file does not exist.
    """
    if target.endswith(".keras"):
        return _load_file(pathlib.Path(target))
    module, colon, function = target.partition(":")
    if not colon or not module or not function:
        raise ValueError(
            "The model must be a .keras file or module:function. Received: "
            f"{target!r}."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    return getattr(importlib.import_module(module), function)()


def _load_file(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"The model file does not exist: {path}.")
    with zipfile.ZipFile(path) as archive:
        version = json.loads(archive.read("metadata.json"))["keras_version"]
    if version.startswith("2."):
        import tf_keras

        # Registers the class of replaced layers.
        import tf_layoutmap.layers.tf_keras  # noqa: F401

        return tf_keras.models.load_model(path)
    import keras

    return keras.models.load_model(path)


def main(arguments: Sequence[str]) -> int:
    """Prints the report of a model and returns the exit status."""
    options = read_arguments(arguments)
    report = shard_embeddings(
        load_model(options.model),
        min_rows=options.min_rows,
        optimizer=options.optimizer,
        rules_by_row=options.rules_by_row,
        batch_ids=options.batch_ids,
        is_dry_run=True,
    )
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        report.print()
    return 0
