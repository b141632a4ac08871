"""The steps of a run: data, training, metrics and export."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import logical_mesh
import numpy as np

import tf_layoutmap as tlm
from completion import cluster, evaluation, serving, training
from completion.data.corpus import Corpus, DataError, held_out_documents
from completion.data.features import FeatureReader
from completion.data.sampling import BatchSampler
from completion.data.vocabulary import UNKNOWN, ItemVocabulary
from completion.mesh_model import MeshCompleter
from completion.model import Completer, to_tensors
from completion.plan import Plan
from completion.report import Report
from completion.settings import Settings

_HELD_OUT = 0.1
_MIN_COUNT = 2
_NUM_OFFERS = 10
_SERVED = 200  # Number of positions that the exported model predicts.
_SHOWN = 6  # Number of positions that are printed.
_ASKED = ("self", "append", "path", "ValueError", "len", "i")


def run(
    corpus: Corpus,
    settings: Settings,
    report: Report,
    *,
    data: str,
    model_dir: str | None,
    fresh: bool,
    save_every: int,
    max_held_out: int,
    mesh: tuple[int, int] | None = None,
    servers: bool = False,
) -> None:
    """Trains, measures and exports a model.

    Args:
      corpus: Data set.
      settings: Sizes and learning rates.
      report: Report to print to.
      data: Value of --data, which is a part of the name of the default folder.
      model_dir: Folder of the checkpoints, or None for the default folder.
      fresh: Whether to remove the checkpoints of earlier runs before training.
      save_every: Steps between checkpoints.
      max_held_out: Maximum number of positions to measure on.
      mesh: Sizes of the axes "batch" and "model" of a mesh of logical CPUs for
        the tower, or None for a tower on the host.
      servers: Whether to train on the cluster of `TF_CONFIG`.

    Raises:
      DataError: The data has too few positions, or the folder contains a
        different model.
      RuntimeError: The predictions of the exported model differ from the
        trained model.
    """
    # TensorFlow can split the CPU only before it runs its first operation.
    mesh = None if mesh is None else logical_mesh.make_mesh(mesh)
    strategy = tlm.ps.connect() if servers else None
    held_out = held_out_documents(
        corpus.documents, fraction=_HELD_OUT, seed=settings.seed
    )
    train_positions = corpus.positions_of(~held_out)
    vocabulary = ItemVocabulary(
        corpus.items[train_positions], corpus.item_names, min_count=_MIN_COUNT
    )
    reader = FeatureReader(corpus, vocabulary, held_out)
    train_positions = train_positions[
        reader.targets(train_positions) != UNKNOWN
    ]
    test_positions = evaluation.chosen_positions(
        corpus.positions_of(held_out), max_held_out, settings.seed
    )
    _check_enough(corpus, settings, len(train_positions), len(test_positions))
    settings = settings.steps_for(len(train_positions))
    unknown = np.mean(reader.targets(test_positions) == UNKNOWN)
    report.read(
        corpus,
        vocabulary,
        held_out,
        len(train_positions),
        len(test_positions),
        unknown,
    )

    plan = Plan(reader.num_rows, settings)
    model = (
        Completer(plan, vocabulary.log_shares())
        if mesh is None
        else MeshCompleter(plan, vocabulary.log_shares(), mesh)
    )
    report.plan(plan.costs(), model.tower.count_params())
    if mesh is not None:
        report.say(str(model.layout_map.explain(model.tower)))

    facts = {
        "vocabulary": _digest(vocabulary.names),
        "held out": _digest(np.array(corpus.documents)[held_out]),
        **plan.shape_facts(),
    }
    folder = (
        Path(model_dir).expanduser()
        if model_dir
        else _cache_folder(data, facts)
    )
    if fresh:
        forget(folder)
    training.claim_folder(folder, facts)
    sampler = BatchSampler(
        train_positions,
        vocabulary.counts,
        batch_size=settings.batch_size,
        num_negatives=settings.num_negatives,
        seed=settings.seed,
    )
    if strategy is not None:
        report.say(
            "Tables and tower are on the parameter servers. The workers train "
            f"asynchronously, {settings.num_steps:,} steps in total."
        )
        rate, newest = cluster.train(
            strategy,
            lambda: Completer(plan, vocabulary.log_shares()),
            cluster.write_batches(reader, sampler, settings.num_steps, folder),
            folder,
            num_steps=settings.num_steps,
        )
        cluster.read(model, newest)
        # The following code reads this checkpoint, whether the model was
        # trained on servers or in this process.
        newest = training.Checkpoints(model, folder).save(int(model.step))
    else:
        checkpoints = training.Checkpoints(model, folder)
        restored = checkpoints.restore()
        report.begin(restored, int(model.step), folder)
        rate = training.train(
            model,
            reader,
            sampler,
            checkpoints,
            num_steps=settings.num_steps,
            save_every=save_every,
        )
        newest = checkpoints.latest
    report.say(
        f"Trained at {rate:,.0f} examples per second."
        if rate
        else f"Training is complete: --steps={settings.num_steps:,}. Pass "
        "--fresh to train a new model."
    )

    report.comparison(
        evaluation.compare(
            model, reader, vocabulary, train_positions, test_positions
        ),
        len(test_positions),
        corpus,
        vocabulary.num_rows - 1,
    )
    _show_neighbours(model, vocabulary, report, corpus.words["item"])
    _export_and_ask(
        model, plan, reader, vocabulary, newest, folder, test_positions, report
    )
    report.print_summary()


def _check_enough(
    corpus: Corpus, settings: Settings, num_training: int, num_held_out: int
) -> None:
    words = corpus.words
    if len(corpus.documents) < 2 or not num_held_out:
        raise DataError(
            f"--data must contain at least two {words['document']}s with "
            f"{words['item']}s, because one is held out. Received: "
            f"{len(corpus.documents)} {words['document']}s, {num_held_out} "
            "held-out positions."
        )
    if num_training < settings.batch_size:
        raise DataError(
            f"--data must contain at least --batch_size={settings.batch_size} "
            f"positions to train on, of {words['item']}s that occur "
            f"{_MIN_COUNT} times. Received: {num_training}. Pass more "
            f"{words['document']}s or a smaller --batch_size."
        )


def _show_neighbours(
    model: Completer, vocabulary: ItemVocabulary, report: Report, item: str
) -> None:
    row_of = {name: row for row, name in enumerate(vocabulary.names)}
    asked = [row_of[name] for name in _ASKED if name in row_of]
    asked = asked or list(range(1, min(7, vocabulary.num_rows)))
    # Rare items are excluded, because their rows are close to the initial
    # values.
    among = int(np.sum(vocabulary.counts[1:] >= 20)) + 1
    found = evaluation.neighbours(model.candidate_rows(), asked, among, 6)
    report.table(
        f"Nearest neighbours among {among - 1:,} {item}s seen 20 times or more",
        [item, "neighbours, nearest first"],
        [
            [
                vocabulary.names[row],
                ", ".join(vocabulary.names[other] for other in others),
            ]
            for row, others in zip(asked, found, strict=True)
        ],
    )


def _export_and_ask(
    model: Completer,
    plan: Plan,
    reader: FeatureReader,
    vocabulary: ItemVocabulary,
    checkpoint: str,
    folder: Path,
    test_positions: np.ndarray,
    report: Report,
) -> None:
    served = serving.Served(
        plan, vocabulary.names, vocabulary.log_shares(), checkpoint
    )
    exported = folder / "saved_model"
    size = serving.export(served, exported)
    report.say(
        f"Exported to {exported}, {size / 1e6:.1f} MB, with TensorFlow's own "
        "operations only."
    )

    count = min(_SERVED, len(test_positions))
    chosen = test_positions[
        np.linspace(0, len(test_positions) - 1, count).astype(np.int64)
    ]
    batch = reader.batch(chosen)
    offers = min(_NUM_OFFERS, vocabulary.num_rows)
    names, scores = serving.ask_elsewhere(exported, batch, offers)
    own_scores, own_rows = model.complete(to_tensors(batch), offers)
    difference = serving.compare_answers(
        [[vocabulary.names[row] for row in rows] for rows in own_rows.numpy()],
        own_scores.numpy(),
        names,
        scores,
    )
    report.say(
        f"A process without tf_layoutmap returned the same {offers} offers for "
        f"each of {count} held-out positions; "
        + (
            f"scores differ by at most {difference:.1e}."
            if difference
            else "scores are bitwise identical."
        )
    )
    targets = reader.targets(chosen)
    shown = np.flatnonzero(targets != UNKNOWN)
    shown = (
        shown[np.linspace(0, len(shown) - 1, _SHOWN).astype(np.int64)]
        if len(shown)
        else shown
    )
    report.table(
        "Predictions at held-out positions",
        ["previous identifiers", "best offers", "target"],
        [
            [
                " ".join(reader.item_names_before(chosen[index], 4))
                or "(start)",
                ", ".join(names[index][:5]),
                vocabulary.names[targets[index]],
            ]
            for index in shown
        ],
    )


def forget(folder: Path) -> None:
    """Removes the files of earlier runs from `folder`; keeps other files."""
    for name in ("checkpoints", *cluster.FOLDERS, "saved_model"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / training.FACTS).unlink(missing_ok=True)


def _cache_folder(data: str, facts: dict[str, object]) -> Path:
    """Returns a folder in the user's cache for this data and plan."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        # The path is relative if the user has no home directory.
        cache = tempfile.gettempdir()
    label = data if data in ("stdlib", "movielens") else "folder"
    return Path(
        cache,
        "tf_layoutmap",
        "next_identifier",
        f"{label}-{_digest([repr(facts), data])}",
    )


def _digest(names) -> str:
    joined = "\n".join(names).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(joined, digest_size=6).hexdigest()
