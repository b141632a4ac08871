"""Program that measures FBGEMM's tables for inference on the CPU.

The program requires a Python interpreter with `torch` and `fbgemm-gpu-cpu`, but
not TensorFlow. Each line of the standard input is a command, which is a JSON
list. For each command, the program writes a result as one line of JSON. The
commands and their results are:

    ["open", number of tables, rows, columns]       versions
    ["call", type of the rows, batch, number]       milliseconds

`call` looks up one id per table and sample, and applies a dense layer with one
unit, as the model of `benchmarks/serving.py` does. The type of the rows is
`"float32"`, `"int8"` or `"int4"`. The number selects the ids.
"""

import json
import sys
import time
from importlib import metadata

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

KINDS = {
    "float32": SparseType.FP32,
    "int8": SparseType.INT8,
    "int4": SparseType.INT4,
}
_NUM_BATCHES = 16


class Server:
    """Runs the commands of the module's docstring."""

    def __init__(self):
        self._tables = {}
        self._inputs = {}
        self._sizes = (0, 0, 0)

    def open(self, num_tables: int, num_rows: int, dim: int) -> dict[str, str]:
        """Creates tables of all types, with random rows."""
        self._sizes = num_tables, num_rows, dim
        for name, kind in KINDS.items():
            tables = IntNBitTableBatchedEmbeddingBagsCodegen(
                [
                    (f"t{i}", num_rows, dim, kind, EmbeddingLocation.HOST)
                    for i in range(num_tables)
                ],
                pooling_mode=PoolingMode.SUM,
                device="cpu",
                output_dtype=SparseType.FP32,
            )
            tables.initialize_weights()
            # Some random bit patterns are scales or values that are not finite.
            # They do not affect the time.
            tables.fill_random_weights()
            self._tables[name] = tables
        self._dense = torch.nn.Linear(num_tables * dim, 1)
        return {
            name: metadata.version(name) for name in ("torch", "fbgemm-gpu-cpu")
        }

    def call(self, kind: str, batch_size: int, number: int) -> float:
        """Returns the milliseconds of a call."""
        ids, offsets = self._batches(batch_size)[number % _NUM_BATCHES]
        with torch.no_grad():
            start = time.perf_counter()
            result = self._dense(self._tables[kind](ids, offsets))
            passed = 1e3 * (time.perf_counter() - start)
        del result
        return passed

    def _batches(self, batch_size: int) -> list:
        num_tables, num_rows, _ = self._sizes
        if batch_size not in self._inputs:
            random = torch.Generator().manual_seed(0)
            count = num_tables * batch_size
            self._inputs[batch_size] = [
                (
                    torch.randint(
                        0,
                        num_rows,
                        (count,),
                        dtype=torch.int32,
                        generator=random,
                    ),
                    torch.arange(count + 1, dtype=torch.int32),
                )
                for _ in range(_NUM_BATCHES)
            ]
        return self._inputs[batch_size]


def main() -> None:
    """Runs commands until the standard input ends."""
    server = Server()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer = getattr(server, verb)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
