"""Program that measures tables of FBGEMM and torch (`make bench-peers`).

The program requires a Python interpreter with `torch` and `fbgemm-gpu-cpu`, but
not TensorFlow. Each line of the standard input is a command, which is a JSON
list. For each command, the program writes a result as one line of JSON. The
commands and their results are:

    ["open", name of the workload, seeds of its batches]     versions
    ["lookup", contestant, number of the batch]              milliseconds
    ["train", contestant, number of the batch]               milliseconds
    ["open_dlrm", contestant, size, distribution]            versions
    ["train_dlrm", contestant, size, number of batches]      milliseconds

The contestants are `fbgemm`, one table-batched embedding, and `bag`, one
`torch.nn.EmbeddingBag` with sparse gradients per table.
"""

import json
import sys
import time
from collections.abc import Sequence
from importlib import metadata

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks import workloads

LEARNING_RATE = 0.05


class FbgemmTables:
    """FBGEMM's tables, and their inputs: ids and splits of all features."""

    def __init__(self, num_rows: Sequence[int], dim: int):
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (size, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for size in num_rows
            ],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        self._tables.init_embedding_weights_uniform(-0.05, 0.05)

    @staticmethod
    def inputs(batch: list[tuple[np.ndarray, np.ndarray]]):
        """Returns the concatenated ids of all features and the offsets."""
        starts, num_ids = [np.zeros([1], np.int64)], 0
        for ids, splits in batch:
            starts.append(splits[1:] + num_ids)
            num_ids += len(ids)
        return (
            torch.from_numpy(np.concatenate([ids for ids, _ in batch])),
            torch.from_numpy(np.concatenate(starts)),
        )

    def __call__(self, inputs):
        """Returns the activations of all features, `[B, features * dim]`."""
        return self._tables(*inputs)

    def update(self) -> None:
        """Does nothing, because the backward pass has updated the tables."""


class BagTables:
    """One `torch.nn.EmbeddingBag` per table, with a sparse Adagrad."""

    def __init__(self, num_rows: Sequence[int], dim: int):
        self._bags = [
            torch.nn.EmbeddingBag(
                size,
                dim,
                mode="sum",
                sparse=True,
                include_last_offset=True,
                _weight=torch.empty(size, dim).uniform_(-0.05, 0.05),
            )
            for size in num_rows
        ]
        self._optimizer = torch.optim.Adagrad(
            [bag.weight for bag in self._bags],
            LEARNING_RATE,
            initial_accumulator_value=0.1,
        )

    @staticmethod
    def inputs(batch: list[tuple[np.ndarray, np.ndarray]]):
        """Returns the ids and the offsets of each feature."""
        return [
            (torch.from_numpy(ids), torch.from_numpy(splits))
            for ids, splits in batch
        ]

    def __call__(self, inputs):
        """Returns the activations of all features, `[B, features * dim]`."""
        activations = [
            bag(*arguments) for bag, arguments in zip(self._bags, inputs)
        ]
        return (
            activations[0]
            if len(activations) == 1
            else torch.cat(activations, dim=1)
        )

    def update(self) -> None:
        """Applies the gradients of the last backward pass."""
        self._optimizer.step()
        self._optimizer.zero_grad()


TABLES = {"fbgemm": FbgemmTables, "bag": BagTables}


class Step:
    """Tables with given gradients."""

    def __init__(self, name: str, workload: workloads.Workload, batches):
        self._tables = TABLES[name](workload.num_rows, workload.dim)
        self._inputs = [self._tables.inputs(batch) for batch in batches]
        self._gradient = torch.randn(
            workload.num_samples, len(workload.num_rows) * workload.dim
        )

    def lookup(self, batch: int):
        """Looks up a batch."""
        with torch.no_grad():
            return self._tables(self._inputs[batch])

    def train(self, batch: int):
        """Looks up a batch and updates its rows."""
        activations = self._tables(self._inputs[batch])
        activations.backward(self._gradient)
        self._tables.update()
        return activations


class Dlrm(torch.nn.Module):
    """DLRM (Naumov et al., 2019) with Adagrad for all weights."""

    def __init__(self, name: str, size: workloads.Dlrm, distribution: str):
        super().__init__()
        dim = size.dim
        self._tables = TABLES[name](size.num_rows, dim)
        self._num_tables = len(size.num_rows)
        self._bottom = _mlp([size.num_numbers, *size.bottom, dim])
        num_rows = self._num_tables + 1
        self._pairs = torch.tril_indices(num_rows, num_rows, offset=-1)
        num_pairs = num_rows * (num_rows - 1) // 2
        self._top = torch.nn.Sequential(
            _mlp([dim + num_pairs, *size.top]),
            torch.nn.Linear(size.top[-1], 1),
        )
        self._optimizer = torch.optim.Adagrad(
            self.parameters(), LEARNING_RATE, initial_accumulator_value=0.1
        )
        splits = np.arange(size.num_samples + 1)
        self._batches = [
            (
                torch.from_numpy(numbers),
                self._tables.inputs([(table_ids, splits) for table_ids in ids]),
                torch.from_numpy(labels),
            )
            for numbers, ids, labels in size.draw(distribution)
        ]

    def forward(self, numbers, inputs):
        """Returns the logits, `[B, 1]`."""
        bottom = self._bottom(numbers)
        activations = self._tables(inputs).view(
            len(numbers), self._num_tables, bottom.shape[1]
        )
        rows = torch.cat([bottom.unsqueeze(1), activations], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        pairs = products[:, self._pairs[0], self._pairs[1]]
        return self._top(torch.cat([bottom, pairs], dim=1))

    def train_batches(self, count: int) -> None:
        """Trains with `count` batches."""
        for i in range(count):
            numbers, inputs, labels = self._batches[i % len(self._batches)]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                self(numbers, inputs), labels
            )
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._tables.update()
            loss.item()


def _mlp(widths: list[int]) -> torch.nn.Sequential:
    layers = []
    for before, after in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def _versions() -> dict[str, str]:
    return {
        name: metadata.version(name) for name in ("torch", "fbgemm-gpu-cpu")
    }


class Server:
    """Runs the commands of the module's docstring."""

    def __init__(self):
        self._steps = {}
        self._models = {}

    def open(self, name: str, seeds: list[int]) -> dict[str, str]:
        """Creates the tables of a workload; frees the previous ones."""
        self._steps.clear()
        workload = workloads.WORKLOADS[name]
        batches = [workload.draw(seed) for seed in seeds]
        for table in TABLES:
            self._steps[table] = Step(table, workload, batches)
        return _versions()

    def open_dlrm(
        self, name: str, size: str, distribution: str
    ) -> dict[str, str]:
        """Creates a model; frees models of other sizes."""
        for key in [key for key in self._models if key[1] != size]:
            del self._models[key]
        self._models[name, size] = Dlrm(
            name, workloads.DLRMS[size], distribution
        )
        return _versions()

    def lookup(self, name: str, batch: int) -> float:
        """Returns the milliseconds of a lookup."""
        return _milliseconds(lambda: self._steps[name].lookup(batch))

    def train(self, name: str, batch: int) -> float:
        """Returns the milliseconds of a training step of the tables."""
        return _milliseconds(lambda: self._steps[name].train(batch))

    def train_dlrm(self, name: str, size: str, count: int) -> float:
        """Returns the milliseconds of `count` training steps of a model."""
        model = self._models[name, size]
        return _milliseconds(lambda: model.train_batches(count))


def _milliseconds(run) -> float:
    start = time.perf_counter()
    result = run()
    passed = 1e3 * (time.perf_counter() - start)
    del result
    return passed


def main():
    """Runs commands until the standard input ends."""
    server = Server()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer = getattr(server, verb)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
