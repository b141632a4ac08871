"""The run from beginning to end, in the order a person reads it."""

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
    """Reads, trains, measures and shows.

    Raises:
      DataError: The data cannot be used, the folder belongs to another
        model, or the saved model is damaged.
    """
    mesh = logical_mesh.make_mesh(settings.mesh)
    text = read(data, settings)
    report.table("What it read", ["", ""], text.facts)
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
            f"Nothing left to train: --epochs={settings.epochs}. "
            "--fresh starts over."
        )
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    fullest, once = held_bytes(model)
    report.say(
        f"Measured: the fullest device holds {fullest / 2**20:.2f} MiB "
        f"of weights and optimizer; one copy is {once / 2**20:.2f} "
        "MiB."
    )
    compare(model, text, windows, settings, report)
    report.table(
        "What it makes up",
        ["given", "continued"],
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
    """Reads what --data asks for."""
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
    """Compares the model's held-out loss with those of counting."""
    losses = {
        name: ngram_loss(text.training, windows, len(text.characters), order)
        for order, name in enumerate(("unigrams", "bigrams", "trigrams"), 1)
    }
    counted = losses["bigrams"]
    losses["the model"] = loss = model.evaluate(
        windows[:, :-1],
        windows[:, 1:],
        batch_size=settings.batch_size,
        verbose=0,
        return_dict=True,
    )["loss"]
    report.table(
        f"Held-out files: {windows.shape[0] * settings.context:,} characters",
        ["guessed by", "nats", "bits", "one in"],
        [
            [
                name,
                f"{value:.3f}",
                f"{value / np.log(2):.3f}",
                f"{np.exp(value):.1f}",
            ]
            for name, value in losses.items()
        ],
        numbers=["nats", "bits", "one in"],
    )
    report.say(
        "All guess the same characters from what stands before them in a "
        f"window of {settings.context}. "
        + (
            f"The model beats bigrams by {counted - loss:.3f} nats."
            if loss < counted
            else "The model does not beat bigrams yet: train it longer."
        )
    )


def forget(folder: Path) -> None:
    """Removes what a run has left in `folder`, and nothing else."""
    for saved in folder.glob("epoch-*.keras"):
        saved.unlink()
    (folder / FACTS).unlink(missing_ok=True)


def _cache_folder(data: str) -> Path:
    """Returns a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        cache = tempfile.gettempdir()  # There is no home.
    label = (
        "stdlib"
        if data == "stdlib"
        else (Path(data).expanduser().resolve().name or "root")
    )
    return Path(cache, "tf_layoutmap", "sharded_transformer", label)
