"""Program that measures FBGEMM's tables on the CPU (`make bench-peers`).

The program requires a Python interpreter with `torch` and `fbgemm-gpu-cpu`, but
not TensorFlow. Each line of the standard input is a command, which is a JSON
list. For each command, the program writes a result as one line of JSON. The
commands and their results are:

    ["open", name of the workload, seeds of its batches]  versions
    ["lookup", number of the batch]                        milliseconds
    ["train", number of the batch]                         milliseconds
"""

import json
import sys
import time
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


class Tables:
    """FBGEMM's tables for a workload, and batches in FBGEMM's format."""

    def __init__(self, workload: workloads.Workload, seeds: list[int]):
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    num_rows,
                    workload.dim,
                    EmbeddingLocation.HOST,
                    ComputeDevice.CPU,
                )
                for num_rows in workload.num_rows
            ],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        self._tables.init_embedding_weights_uniform(-0.05, 0.05)
        self._batches = [_joined(workload.draw(seed)) for seed in seeds]
        self._gradient = torch.randn(
            workload.num_samples, len(workload.num_rows) * workload.dim
        )

    def lookup(self, batch: int):
        """Looks up a batch."""
        with torch.no_grad():
            return self._tables(*self._batches[batch])

    def train(self, batch: int):
        """Looks up a batch and updates its rows."""
        activations = self._tables(*self._batches[batch])
        activations.backward(self._gradient)
        return activations


def _joined(batch):
    """Returns the concatenated ids of all features and the sample offsets."""
    starts, num_ids = [np.zeros([1], np.int64)], 0
    for ids, splits in batch:
        starts.append(splits[1:] + num_ids)
        num_ids += len(ids)
    return (
        torch.from_numpy(np.concatenate([ids for ids, _ in batch])),
        torch.from_numpy(np.concatenate(starts)),
    )


def main():
    """Runs commands until the standard input ends."""
    tables = None
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "open":
            del tables
            tables = Tables(workloads.WORKLOADS[arguments[0]], arguments[1])
            answer = {
                name: metadata.version(name)
                for name in ("torch", "fbgemm-gpu-cpu")
            }
        else:
            start = time.perf_counter()
            result = getattr(tables, verb)(*arguments)
            answer = 1e3 * (time.perf_counter() - start)
            del result
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
