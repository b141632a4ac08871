"""Generates the views of a shop with new users and new items on each day."""

from __future__ import annotations

import dataclasses

import numpy as np

NUM_CITIES = 8
_NUM_GROUPS = 6
_FIRST_ITEMS, _NEW_ITEMS = 400, 60
_FIRST_USERS, _NEW_USERS = 1000, 150
# One in this number of views is held out.
_HELD_OUT = 10


@dataclasses.dataclass(frozen=True)
class Views:
    """Views of items by users; one string per view.

    Attributes:
      users: Ids of users.
      cities: City of each user.
      items: Ids of the viewed items.
    """

    users: list[str]
    cities: list[str]
    items: list[str]


@dataclasses.dataclass(frozen=True)
class Day:
    """The views of one day.

    Attributes:
      training: Views to train on.
      held_out: Views to measure on.
      num_new_items: Number of items that did not exist on the previous day.
    """

    training: Views
    held_out: Views
    num_new_items: int

    def recall_of_popular(self, at: int) -> float:
        """Returns the recall of the items with the most views of the day."""
        items, counts = np.unique(self.training.items, return_counts=True)
        best = items[np.argsort(-counts)[:at]]
        return float(np.isin(self.held_out.items, best).mean())


class Shop:
    """A shop whose users prefer one of several groups of items.

    >>> shop = Shop(1000, seed=1)
    >>> day = shop.next_day()
    >>> len(day.training.users), len(day.held_out.users)
    (900, 100)
    >>> shop.next_day().num_new_items
    60

    Attributes:
      items: Ids of all items so far.
    """

    def __init__(self, views_per_day: int, seed: int):
        """Creates a shop without items and users; `next_day` adds them."""
        self._views_per_day = views_per_day
        self._draw = np.random.default_rng(seed)
        self._day = 0
        self._users: list[str] = []
        self._group_of_user = np.zeros([0], np.int64)
        self._group_of_item = np.zeros([0], np.int64)
        self._popularity = np.zeros([0])
        self.items: list[str] = []

    def next_day(self) -> Day:
        """Adds new users and items, and returns the views of the day."""
        is_first = not self.items
        new_items = _FIRST_ITEMS if is_first else _NEW_ITEMS
        new_users = _FIRST_USERS if is_first else _NEW_USERS
        self._day += 1
        self.items += [f"item {self._day}-{n}" for n in range(new_items)]
        self._users += [f"user {self._day}-{n}" for n in range(new_users)]
        # Old items become less popular each day.
        self._popularity = np.concatenate(
            [0.7 * self._popularity, self._draw.pareto(1.2, new_items) + 0.2]
        )
        self._group_of_user, self._group_of_item = (
            np.concatenate([old, self._draw.integers(0, _NUM_GROUPS, size)])
            for old, size in (
                (self._group_of_user, new_users),
                (self._group_of_item, new_items),
            )
        )
        users = self._draw.integers(0, len(self._users), self._views_per_day)
        items = np.zeros_like(users)
        for group in range(_NUM_GROUPS):
            # About nine of ten views are of items of the user's group.
            is_own = self._group_of_item == group
            weights = self._popularity * np.where(is_own, 1.0, 0.02)
            here = np.flatnonzero(self._group_of_user[users] == group)
            items[here] = self._draw.choice(
                len(self.items), len(here), p=weights / weights.sum()
            )
        is_held_out = np.arange(self._views_per_day) % _HELD_OUT == 0
        return Day(
            self._views(users[~is_held_out], items[~is_held_out]),
            self._views(users[is_held_out], items[is_held_out]),
            new_items,
        )

    def _views(self, users: np.ndarray, items: np.ndarray) -> Views:
        # Three of four users of a group live in the same city.
        cities = np.where(users % 4 == 0, users, self._group_of_user[users])
        return Views(
            [self._users[n] for n in users],
            [f"city {n % NUM_CITIES}" for n in cities],
            [self.items[n] for n in items],
        )
