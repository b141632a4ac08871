"""Generates a synthetic data set of views and purchases in a shop.

No real data is used. All values are drawn from one seed, so the same arguments
always give the same data set. Users and items have hidden vectors. A user views
items that are popular and similar to the user's vector, and buys a viewed item
with a probability that depends on a second pair of hidden vectors.
"""

from __future__ import annotations

import dataclasses

import numpy as np

NUM_JOBS = 8
NUM_CATEGORIES = 20
_LATENT_DIM = 4


@dataclasses.dataclass(frozen=True)
class Views:
    """Views of items by users, one element per view.

    Attributes:
      users: `[num_views]` int64 user ids.
      items: `[num_views]` int64 item ids.
      purchases: `[num_views]` float32, 1 if the user bought the item.
      probabilities: `[num_views]` float32, the true purchase probabilities.
    """

    users: np.ndarray
    items: np.ndarray
    purchases: np.ndarray
    probabilities: np.ndarray

    def __len__(self) -> int:
        return len(self.users)

    def take(self, index: np.ndarray) -> Views:
        """Returns the views that a mask or an array of indices selects."""
        return Views(
            *(getattr(self, field.name)[index] for field in _fields(self))
        )


@dataclasses.dataclass(frozen=True)
class Shop:
    """A generated data set.

    Attributes:
      job_of: `[num_users]` int64, the job of each user.
      category_of: `[num_items]` int64, the category of each item.
      training: Views to train on.
      held_out: The last view of each user.
    """

    job_of: np.ndarray
    category_of: np.ndarray
    training: Views
    held_out: Views

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.job_of)

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.category_of)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays that a model may read, in bytes."""
        arrays = [self.job_of, self.category_of]
        for views in (self.training, self.held_out):
            arrays += [views.users, views.items, views.purchases]
        return sum(array.nbytes for array in arrays)


def generate(
    *, num_users: int, num_items: int, views_per_user: int, seed: int
) -> Shop:
    """Returns a data set that depends only on the arguments.

    >>> shop = generate(num_users=5, num_items=30, views_per_user=4, seed=1)
    >>> len(shop.training), len(shop.held_out), shop.num_items
    (15, 5, 30)

    Args:
      num_users: Number of users.
      num_items: Number of items, at least `views_per_user`.
      views_per_user: Number of distinct items that each user views. The last
        view is held out.
      seed: Seed of all draws.
    """
    draw = np.random.default_rng(seed)
    job_of = draw.integers(0, NUM_JOBS, num_users)
    category_of = draw.integers(0, NUM_CATEGORIES, num_items)
    tastes = _vectors(draw, job_of, NUM_JOBS)
    styles = _vectors(draw, category_of, NUM_CATEGORIES)
    # The popularity of items follows Zipf's law.
    log_popularity = -0.7 * np.log1p(draw.permutation(num_items))
    scores = log_popularity + tastes @ styles.T
    # The items with the largest sums of score and Gumbel noise are a sample
    # without replacement.
    noisy = scores + draw.gumbel(size=scores.shape)
    items = np.argsort(-noisy, axis=1)[:, :views_per_user]
    items = draw.permuted(items, axis=1).ravel()
    users = np.repeat(np.arange(num_users), views_per_user)

    needs = _vectors(draw, job_of, NUM_JOBS)
    offers = _vectors(draw, category_of, NUM_CATEGORIES)
    logits = np.sum(needs[users] * offers[items], axis=1) - 1.0
    probabilities = 1 / (1 + np.exp(-logits))
    views = Views(
        users,
        items,
        (draw.random(len(users)) < probabilities).astype(np.float32),
        probabilities.astype(np.float32),
    )
    is_last = np.arange(len(views)) % views_per_user == views_per_user - 1
    return Shop(job_of, category_of, views.take(~is_last), views.take(is_last))


def _vectors(draw, group_of, num_groups):
    """Draws the vector of each group member: the group's vector plus noise."""
    groups = draw.normal(0, 0.8, (num_groups, _LATENT_DIM))
    return groups[group_of] + draw.normal(0, 0.6, (len(group_of), _LATENT_DIM))


def _fields(views):
    return dataclasses.fields(views)
