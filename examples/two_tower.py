"""Recommends items: two-tower retrieval, then ranking, in plain Keras.

    python examples/two_tower.py
    python examples/two_tower.py --users=5000 --items=3000 --steps=2000

The data is synthetic and generated in memory (`two_tower_data.py`); nothing is
downloaded. The retrieval model has a user tower and an item tower and learns
which items a user views. The model scores all items of the shop with one matrix
product. The ranking model learns which viewed items a user buys, and orders the
retrieved items. Every table is a `tlm.layers.ShardedEmbedding` with a separate
Adagrad optimizer. The program uses Keras' own `compile` and `fit`.
"""

from __future__ import annotations

import os

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from completion.report import Report
from two_tower_data import Shop, generate

_USERS = flags.DEFINE_integer(
    "users", 3000, "Number of users to generate.", lower_bound=64
)
_ITEMS = flags.DEFINE_integer(
    "items", 1500, "Number of items to generate.", lower_bound=100
)
_STEPS = flags.DEFINE_integer(
    "steps",
    900,
    "Training steps of each model, rounded down to an even number.",
    lower_bound=2,
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "Views in a training step.", lower_bound=2
)
_SHARDS = flags.DEFINE_integer(
    "shards", 4, "Shards of each table.", lower_bound=1
)
_SEED = flags.DEFINE_integer(
    "seed", 7, "Seed of the data and of the initial weights.", lower_bound=0
)

_VIEWS_PER_USER = 16
_NUM_RETRIEVED = 100
_NUM_SHOWN = 3
_AT = 10


def run(
    report: Report,
    shop: Shop,
    *,
    steps: int,
    batch_size: int,
    num_shards: int,
    seed: int,
) -> None:
    """Trains and measures both models, and prints their metrics."""
    # The imports take seconds. They follow the flag checks, so that invalid
    # flags are reported without delay.
    import keras
    import numpy as np
    from clicks.scores import auc
    from two_tower_model import (
        best_items,
        build_ranking,
        build_retrieval,
        features_of,
        item_counts,
        ranking_scores,
        recall,
        retrieve,
        train,
    )

    keras.utils.set_random_seed(seed)
    options = dict(
        steps=steps, batch_size=batch_size, seed=seed, say=report.say
    )
    report.table(
        "Data: synthetic, generated in memory",
        ["", ""],
        [
            ("users, items", f"{shop.num_users:,}, {shop.num_items:,}"),
            (
                "views",
                f"{len(shop.training):,} to train on, "
                f"{len(shop.held_out):,} held out (the last of each user)",
            ),
            (
                "purchases",
                f"{np.mean(shop.training.purchases):.1%} of the views",
            ),
            ("size", f"{shop.num_bytes / 1e6:.1f} MB"),
        ],
    )

    features = features_of(shop, shop.training)
    counts = item_counts(shop)
    shares = np.maximum(counts, 1) / counts.sum()
    report.say("Training the retrieval model:")
    retrieval, user_tower, item_tower = build_retrieval(shop, num_shards)
    train(
        retrieval,
        {
            **features,
            "log_share": np.log(shares[shop.training.items]).astype(np.float32),
        },
        None,
        **options,
    )
    users, viewed = shop.held_out.users, shop.held_out.items
    retrieved = retrieve(shop, user_tower, item_tower, users, _NUM_RETRIEVED)
    popular = best_items(
        shop, users, np.tile(counts, (len(users), 1)), _NUM_RETRIEVED
    )
    measured = {
        "popular recall@10": recall(popular, viewed, _AT),
        "popular recall@100": recall(popular, viewed, _NUM_RETRIEVED),
        "retrieval recall@10": recall(retrieved, viewed, _AT),
        "retrieval recall@100": recall(retrieved, viewed, _NUM_RETRIEVED),
    }
    report.table(
        f"Retrieval: the held-out item among all {shop.num_items:,} items",
        ["model", "recall@10", "recall@100"],
        [
            [
                label,
                f"{measured[f'{name} recall@10']:.3f}",
                f"{measured[f'{name} recall@100']:.3f}",
            ]
            for name, label in (
                ("popular", "most popular items"),
                ("retrieval", "two towers"),
            )
        ],
        numbers=["recall@10", "recall@100"],
    )

    report.say("Training the ranking model:")
    ranking = build_ranking(shop, num_shards)
    train(ranking, features, shop.training.purchases, **options)
    labels = shop.held_out.purchases
    bought = np.bincount(
        shop.training.items, shop.training.purchases, shop.num_items
    )
    mean = shop.training.purchases.mean()
    # To smooth the rates, ten views with the mean purchase rate are added to
    # each item.
    rates = (bought + 10 * mean) / (counts + 10)
    measured |= {
        "item rates AUC": auc(labels, rates[viewed]),
        "ranking AUC": auc(
            labels, ranking_scores(shop, ranking, users, viewed)
        ),
        "true AUC": auc(labels, shop.held_out.probabilities),
    }
    report.table(
        "Ranking: purchases among the held-out views",
        ["model", "AUC"],
        [
            ["purchase rate of each item", f"{measured['item rates AUC']:.3f}"],
            ["ranking model", f"{measured['ranking AUC']:.3f}"],
            ["true probabilities", f"{measured['true AUC']:.3f}"],
        ],
        numbers=["AUC"],
    )

    shown = []
    for user, items in zip(users[:_NUM_SHOWN], retrieved[:_NUM_SHOWN]):
        scores = ranking_scores(shop, ranking, np.full(len(items), user), items)
        order = np.argsort(-scores, kind="stable")[:4]
        shown.append(
            [
                f"user {user} (job {shop.job_of[user]})",
                ", ".join(
                    f"item {items[i]} (category "
                    f"{shop.category_of[items[i]]}) {scores[i]:.2f}"
                    for i in order
                ),
            ]
        )
    report.table(
        f"Both stages: {_NUM_RETRIEVED} items retrieved, ranked by purchase "
        "probability",
        ["user", "recommended items"],
        shown,
    )
    report.print_summary()


def main(argv: list[str]) -> None:
    """Generates the data, then trains and measures both models."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    shop = generate(
        num_users=_USERS.value,
        num_items=_ITEMS.value,
        views_per_user=_VIEWS_PER_USER,
        seed=_SEED.value,
    )
    run(
        Report(),
        shop,
        steps=_STEPS.value,
        batch_size=_BATCH_SIZE.value,
        num_shards=_SHARDS.value,
        seed=_SEED.value,
    )


if __name__ == "__main__":
    app.run(main)
