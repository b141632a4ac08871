"""Program that measures TorchRec's managed collision on the CPU.

The program requires a Python interpreter with `torch` and `torchrec`, but not
TensorFlow. Each line of the standard input is a command, which is a JSON list.
For each command, the program writes a result as one line of JSON. The commands
and their results are:

    ["open", distribution, [keys, columns, ids of a batch, batches]]  versions
    ["train", number of the batch]                             milliseconds

A step maps keys to rows with an `MCHManagedCollisionModule`, which uses LRU
eviction and contains all keys. Adagrad then trains these rows of a
`torch.nn.Embedding` with sparse gradients.
"""

import json
import sys
import time
from importlib import metadata

import numpy as np
import torch
from torchrec import JaggedTensor
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)

from benchmarks import workloads

LEARNING_RATE = 0.05


class Table:
    """A `torch.nn.Embedding` with a managed collision module."""

    def __init__(self, distribution: str, sizes: list[int]):
        num_keys, dim, num_ids, num_batches = sizes
        rng = np.random.default_rng(5)
        num_rows = int(num_keys / 0.75)
        self._rows_of = MCHManagedCollisionModule(
            zch_size=num_rows,
            device=torch.device("cpu"),
            eviction_policy=LRU_EvictionPolicy(),
            eviction_interval=2,
            input_hash_size=2**62,
        )
        everything = _features(torch.arange(num_keys))
        # New keys get rows only in every second call, because the eviction
        # interval is 2.
        for _ in range(4):
            self._rows_of.profile(everything)
        remapped = self._rows_of.remap(everything)["keys"].values()
        assert len(remapped.unique()) == num_keys
        # With this interval, only one of 1000 steps evicts keys, so evictions
        # do not change the median.
        self._rows_of._eviction_interval = 1000
        self._table = torch.nn.Embedding(num_rows, dim, sparse=True)
        self._optimizer = torch.optim.Adagrad(
            self._table.parameters(), LEARNING_RATE
        )
        self._factors = torch.randn(num_ids, dim)
        self._batches = [
            torch.from_numpy(
                workloads.draw_ids(rng, distribution, num_ids, num_keys).astype(
                    np.int64
                )
            )
            for _ in range(num_batches)
        ]

    def train(self, batch: int):
        """Maps the keys of a batch to rows and updates the rows."""
        features = _features(self._batches[batch])
        self._rows_of.profile(features)
        rows = self._rows_of.remap(features)["keys"].values()
        self._optimizer.zero_grad()
        (self._table(rows) * self._factors).sum().backward()
        self._optimizer.step()


def _features(keys: torch.Tensor) -> dict[str, JaggedTensor]:
    return {
        "keys": JaggedTensor(
            values=keys, lengths=torch.ones(len(keys), dtype=torch.int64)
        )
    }


def main() -> None:
    """Runs commands until the standard input ends."""
    table = None
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "open":
            table = Table(*arguments)
            answer = {
                name: metadata.version(name) for name in ("torch", "torchrec")
            }
        else:
            start = time.perf_counter()
            getattr(table, verb)(*arguments)
            answer = 1e3 * (time.perf_counter() - start)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
