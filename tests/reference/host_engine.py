"""List-based reference of the host engine, including errors of call order.

A batch has one list of samples per feature; a sample is a list of (id, weight)
pairs.
"""

import collections
import dataclasses

import numpy as np

from tests.reference import apply, unique_rows


class OrderError(Exception):
    """Raised for a call that is not valid in the current state."""


@dataclasses.dataclass
class Feature:
    name: str
    table: int
    combiner: str = "sum"
    max_sequence_length: int = 0


@dataclasses.dataclass
class Table:
    rows: np.ndarray
    optimizer: str
    slots: list[np.ndarray]


@dataclasses.dataclass
class Step:
    training: bool
    batches: dict = dataclasses.field(default_factory=dict)  # By replica.
    gradients: dict = dataclasses.field(default_factory=dict)


class HostEngine:
    """Reference of the engine. `steps` also contains completed steps."""

    def __init__(self, tables, features, *, num_replicas, max_pending_steps):
        self.tables = tables
        self.features = features
        self.num_replicas = num_replicas
        self.max_pending_steps = max_pending_steps
        self.num_updates = 0
        self.num_opened = [0] * num_replicas
        self.opened = {}
        self.reset()

    def reset(self):
        self.steps = []
        self.enqueued = [0] * self.num_replicas
        self.dequeued = [0] * self.num_replicas
        self.awaiting = [False] * self.num_replicas
        self.poisoned = False

    def enqueue(self, replica, training, batch, *, valid=True):
        self._check_agreement()
        step_number = self.enqueued[replica]
        full = self.pending(replica) >= self.max_pending_steps
        begun = step_number < len(self.steps)
        disagrees = begun and self.steps[step_number].training != training
        if full or disagrees or not valid:
            self.poisoned = self.num_replicas > 1
            # If the value and the order of calls are both invalid, the error is
            # about the value.
            raise OrderError if valid else ValueError
        if not begun:
            self.steps.append(Step(training))
        self.steps[step_number].batches[replica] = batch
        self.enqueued[replica] += 1

    def dequeue(self, replica):
        self._check_agreement()
        if self.awaiting[replica] or self.pending(replica) == 0:
            raise OrderError
        for step in self.steps[: self.dequeued[replica]]:
            if step.training and len(step.gradients) < self.num_replicas:
                raise OrderError
        step = self.steps[self.dequeued[replica]]
        self.dequeued[replica] += 1
        self.awaiting[replica] = step.training
        return [
            self._look_up(feature, samples)
            for feature, samples in zip(
                self.features, step.batches[replica], strict=True
            )
        ]

    def apply(self, replica, gradients, hyperparameters):
        self._check_agreement()
        if not self.awaiting[replica]:
            raise OrderError
        step = self.steps[self.dequeued[replica] - 1]
        step.gradients[replica] = gradients
        self.awaiting[replica] = False
        if len(step.gradients) == self.num_replicas:
            self._update(step, hyperparameters)
            self.num_updates += 1

    def open(self, replica, batch):
        """Starts a lookup and returns its token and its activations."""
        self.num_opened[replica] += 1
        token = replica, self.num_opened[replica]
        self.opened[token] = batch
        return token, [
            self._look_up(feature, samples)
            for feature, samples in zip(self.features, batch, strict=True)
        ]

    def apply_followed(self, followed, hyperparameters):
        """Applies all `(token, factor, gradients)` tuples as one update."""
        step = Step(True)
        nth = [0] * self.num_replicas
        for token, factor, gradients in sorted(
            followed, key=lambda one: one[0]
        ):
            replica, _ = token
            key = nth[replica], replica
            nth[replica] += 1
            step.batches[key] = self.opened[token]
            step.gradients[key] = [
                np.float32(factor) * gradient for gradient in gradients
            ]
        self._update(step, hyperparameters)
        self.num_updates += 1

    def pending(self, replica):
        return self.enqueued[replica] - self.dequeued[replica]

    def _check_agreement(self):
        if self.poisoned:
            raise OrderError

    def _terms(self, feature, samples):
        """Yields (row, gain, index of the output row) for each used id."""
        for s, sample in enumerate(samples):
            if feature.max_sequence_length:
                for p, (row, _) in enumerate(
                    sample[: feature.max_sequence_length]
                ):
                    yield row, np.float32(1), (s, p)
                continue
            weights = np.array([w for _, w in sample], np.float32)
            gains = unique_rows.gains(
                [0, len(sample)], weights, feature.combiner
            )
            for (row, _), gain in zip(sample, gains, strict=True):
                yield row, gain, (s,)

    def _look_up(self, feature, samples):
        rows = self.tables[feature.table].rows
        length = feature.max_sequence_length
        shape = [len(samples), *([length] if length else []), rows.shape[1]]
        out = np.zeros(shape, np.float32)
        for row, gain, place in self._terms(feature, samples):
            out[place] += gain * rows[row]
        return out

    def _update(self, step, hyperparameters):
        sums = [
            collections.defaultdict(lambda: np.float32(0)) for _ in self.tables
        ]
        for f, feature in enumerate(self.features):
            # Gradients are added in the order of replicas. For lookups by
            # token, the order is by lookup, and then by replica.
            for key in sorted(step.batches):
                gradient = step.gradients[key][f]
                terms = self._terms(feature, step.batches[key][f])
                for row, gain, place in terms:
                    sums[feature.table][row] = (
                        sums[feature.table][row] + gain * gradient[place]
                    )
        for table, by_row, values in zip(
            self.tables, sums, hyperparameters, strict=True
        ):
            for row, gradient in by_row.items():
                apply.step(
                    table.optimizer,
                    table.rows[row],
                    [slot[row] for slot in table.slots],
                    gradient,
                    values,
                )
