"""Types for arguments that accept only certain strings."""

from typing import Literal

Engine = Literal["auto", "tpu", "host"]
OutOfRange = Literal["error", "drop", "clip"]
WireDtype = Literal["float32", "bfloat16"]
OverProcesses = Literal["replicated", "sharded"]
Admission = Literal["all", "count", "probability"]
Eviction = Literal["none", "lru", "lfu"]
OovEmbedding = Literal["zeros", "trainable"]
GradientAggregation = Literal["exact", "local"]
OnServerLoss = Literal["raise", "restart"]
Policy = Literal["elementwise", "batch_parallel", "replicated", "local_update"]
KeyFileFormat = Literal["numpy", "parquet"]
RowSource = Literal[
    "tf_layoutmap", "tfra", "hugectr", "dynamicemb", "text", "word2vec"
]
RowFormatName = Literal["float32", "float16", "int8", "int4"]
SampleDistribution = Literal["count", "uniform"]
Placement = Literal["div", "mod", "offsets"]
RowRule = Literal["model", "sgd", "adagrad"]
