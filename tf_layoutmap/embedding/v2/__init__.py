"""`TPUEmbeddingV2`: the embedding API of TPUs with SparseCores.

Start with `tpu_embedding_v2.py`, which contains the class for all machines
without SparseCores. `sparse_core.py` contains the class for SparseCores.
"""
