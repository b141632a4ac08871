"""The input of the planner's search: items, their choices and the devices.

An item is a table, or a group of weights whose layouts depend on each other,
such as the two matrices of an MLP. A choice is one way to store an item. The
modules that read Keras models and feature configs create items; the search
selects one choice per item.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

# Mesh axis of each dimension of a weight; None for an unsharded dimension.
Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to store an item.

    Attributes:
      name: Short name, unique within the item, such as `"replicate"`,
        `"rows over model"` or `"table on server 3"`.
      sentence: Continuation of "The planner stores <item> ...", for example
        `"with its rows over the axis 'model'"`.
      memory: Bytes that each device in `devices` needs, by part: `"weights"`,
        `"slot variables"`, `"gradients"`, `"activations"`, `"keys"`.
      seconds: Time that each device in `devices` needs per step, by part:
        `"rows"`, `"compute"`, `"collectives"`, `"network"`.
      devices: Indices of the devices that the item occupies; None for all.
      layouts: Layout of each weight of the item, for a mesh. The key is the
        name of the weight in `Item.weights`.
      num_shards: Number of shards of a table; 1 for a choice on a mesh.
      refused: Reason why the choice cannot be selected; None if it can. Refused
        choices are kept for explanations.
      seconds_per_unit: Increase of the time of the item per unit of
        `Item.quantity`. Explanations use the value to compute the quantity
        above which another choice would be faster.
      causes: Names of shared costs of the problem that occur if the choice is
        selected.
      seconds_if: Additional time on each device if a shared cost occurs, by
        name of the shared cost and by part.
    """

    name: str
    sentence: str
    memory: Mapping[str, int]
    seconds: Mapping[str, float]
    devices: tuple[int, ...] | None = None
    layouts: Mapping[str, Axes] = dataclasses.field(
        default_factory=dict[str, Axes]
    )
    num_shards: int = 1
    refused: str | None = None
    seconds_per_unit: float = 0.0
    causes: tuple[str, ...] = ()
    seconds_if: Mapping[str, Mapping[str, float]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, float]]
    )


@dataclasses.dataclass(frozen=True)
class Item:
    """A table, or a group of weights that is planned as one unit.

    Attributes:
      name: Unique name that a user can pass to `pins` and `why`.
      kind: For example `"table"`, `"embedding"`, `"attention"`, `"mlp"`,
        `"convolution"`, `"matrix"`, `"vector"`.
      weights: Maps the name of each weight to its shape.
      choices: At least one choice.
      keys: Maps each weight to the key that a layout map would contain for it.
        Several weights may share a key, such as the weights of repeated layers.
      quantity: The workload that the times of the choices depend on, such as
        `"unique rows per batch"`; empty if there is none.
      amount: Value of the quantity for which the times were computed.
    """

    name: str
    kind: str
    weights: Mapping[str, tuple[int, ...]]
    choices: tuple[Choice, ...]
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    quantity: str = ""
    amount: float = 0.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """The items of a model and the devices that store them.

    Attributes:
      devices: Name of each device, server or process.
      budgets: Bytes that may be used on each device.
      items: The items, with unique names.
      fixed_memory: Bytes that each device needs in any case, by part.
      fixed_seconds: Time that each device needs per step in any case, by part.
      shared_costs: Times that occur once if at least one selected choice causes
        them, by name and by part. The choices must occupy all devices.
      use_seconds: Time per step of a device that stores at least one item, by
        part.
      sum_share: Share of the sum of the times of all devices that a step takes
        at least, without `fixed_seconds`. The share is 0 if the devices are
        separate machines, and 1 if only one device can run at a time.
      is_limited: Whether the caller set the budgets. If False, the budgets are
        the memory of the plan that was selected without a limit.
    """

    devices: tuple[str, ...]
    budgets: tuple[int, ...]
    items: tuple[Item, ...]
    fixed_memory: Mapping[str, int] = dataclasses.field(
        default_factory=dict[str, int]
    )
    fixed_seconds: Mapping[str, float] = dataclasses.field(
        default_factory=dict[str, float]
    )
    shared_costs: Mapping[str, Mapping[str, float]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, float]]
    )
    use_seconds: Mapping[str, float] = dataclasses.field(
        default_factory=dict[str, float]
    )
    sum_share: float = 0.0
    is_limited: bool = True


def devices_of(choice: Choice, problem: Problem) -> tuple[int, ...]:
    """Returns the devices that a choice occupies."""
    if choice.devices is None:
        return tuple(range(len(problem.devices)))
    return choice.devices


def step_time(times: np.ndarray, fixed: float, sum_share: float) -> np.ndarray:
    """Returns the time of steps from the times of the devices.

    >>> times = np.array([3, 2])
    >>> int(step_time(times, 1, 0.0)), float(step_time(times, 1, 1.0))
    (3, 4.0)

    Args:
      times: `[..., num_devices]` times of each device, which include `fixed`.
      fixed: Time of each device that does not depend on the choices.
      sum_share: See `Problem.sum_share`.
    """
    slowest = times.max(-1)
    if not sum_share:
        return slowest
    return np.maximum(slowest, fixed + sum_share * (times - fixed).sum(-1))
