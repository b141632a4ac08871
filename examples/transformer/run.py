"""The steps of a run: data, training, metrics and generated text."""

from __future__ import annotations

import os
import platform
import sysconfig
import tempfile
from pathlib import Path

import logical_mesh
import numpy as np
from completion.data.python_source import FOLDER_SKIPS, STDLIB_SKIPS
from completion.report import Report
from completion.training import FACTS, claim_folder

from transformer import training
from transformer.baselines import ngram_loss
from transformer.generation import generate
from transformer.model import held_bytes, layout_map_of
from transformer.settings import Settings
from transformer.text import Text

_VOCABULARY = 100
_PROMPTS = ("def ", "class ", "import ", "    return ")


def run(
    report: Report,
    settings: Settings,
    *,
    data: str,
    model_dir: str | None,
    fresh: bool,
    num_windows: int,
    sample_length: int,
) -> None:
    """Trains and measures a model, and generates text.

    Args:
      report: Report to print to.
      settings: Sizes and learning rate.
      data: `"stdlib"`, or the path of a folder of Python files.
      model_dir: Folder of the saved models, or None for the default folder.
      fresh: Whether to remove the saved models of `model_dir` first.
      num_windows: Maximum number of held-out windows to measure on.
      sample_length: Number of characters to generate after each prompt.

    Raises:
      DataError: The data is invalid, the folder contains a different model, or
        the saved model is damaged.
    """
    mesh = logical_mesh.make_mesh(settings.mesh)
    text = read(data, settings)
    report.table("Data", ["", ""], text.facts)
    windows = text.measured_windows(settings.context, num_windows)

    folder = Path(model_dir or _cache_folder(data)).expanduser()
    if fresh:
        forget(folder)
    claim_folder(
        folder, {"vocabulary": text.characters.names, **settings.shape_facts()}
    )
    layout_map = layout_map_of(mesh)
    saved = training.newest(folder)
    model = training.make_or_load(
        layout_map, settings, len(text.characters), folder
    )
    report.say(str(layout_map.explain(model)))
    report.begin(saved, int(model.optimizer.iterations), folder)
    if not training.train(model, text.training, windows, settings, folder):
        report.say(
            f"Training is complete: --epochs={settings.epochs}. Pass --fresh "
            "to train a new model."
        )
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    fullest, once = held_bytes(model)
    report.say(
        f"The fullest device holds {fullest / 2**20:.2f} MiB of weights and "
        f"optimizer variables; one unsharded copy is {once / 2**20:.2f} MiB."
    )
    compare(model, text, windows, settings, report)
    report.table(
        "Generated text",
        ["prompt", "continuation"],
        [
            [prompt, made[len(prompt) :]]
            for prompt, made in zip(
                _PROMPTS,
                generate(
                    model,
                    text.characters,
                    _PROMPTS,
                    length=sample_length,
                    temperature=0.7,
                    seed=settings.seed,
                ),
                strict=True,
            )
        ],
    )
    report.print_summary()


def read(data: str, settings: Settings) -> Text:
    """Returns the text that `data` selects."""
    if data == "stdlib":
        root, skips = Path(sysconfig.get_path("stdlib")), STDLIB_SKIPS
        source = f"standard library of Python {platform.python_version()}"
    else:
        root, skips = Path(data).expanduser(), FOLDER_SKIPS
        source = str(root)
    return Text(
        root,
        skips,
        source,
        vocabulary_size=_VOCABULARY,
        context=settings.context,
        seed=settings.seed,
    )


def compare(
    model, text: Text, windows: np.ndarray, settings: Settings, report: Report
) -> None:
    """Prints the held-out log loss of the model and of n-gram models."""
    losses = {
        name: ngram_loss(text.training, windows, len(text.characters), order)
        for order, name in enumerate(("unigrams", "bigrams", "trigrams"), 1)
    }
    counted = losses["bigrams"]
    losses["Transformer"] = loss = model.evaluate(
        windows[:, :-1],
        windows[:, 1:],
        batch_size=settings.batch_size,
        verbose=0,
        return_dict=True,
    )["loss"]
    report.table(
        f"Held-out files: {windows.shape[0] * settings.context:,} characters",
        ["model", "log loss", "bits", "perplexity"],
        [
            [
                name,
                f"{value:.3f}",
                f"{value / np.log(2):.3f}",
                f"{np.exp(value):.1f}",
            ]
            for name, value in losses.items()
        ],
        numbers=["log loss", "bits", "perplexity"],
    )
    report.say(
        "All models predict the same characters from the previous characters "
        f"in a window of {settings.context}. Log loss is in nats per "
        "character. "
        + (
            f"The Transformer is {counted - loss:.3f} nats better than bigrams."
            if loss < counted
            else "The Transformer is not better than bigrams yet: train it for "
            "more epochs."
        )
    )


def forget(folder: Path) -> None:
    """Removes the models of earlier runs from `folder`; keeps other files."""
    for saved in folder.glob("epoch-*.keras"):
        saved.unlink()
    (folder / FACTS).unlink(missing_ok=True)


def _cache_folder(data: str) -> Path:
    """Returns a folder in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        # The path is relative if the user has no home directory.
        cache = tempfile.gettempdir()
    label = (
        "stdlib"
        if data == "stdlib"
        else (Path(data).expanduser().resolve().name or "root")
    )
    return Path(cache, "tf_layoutmap", "sharded_transformer", label)
