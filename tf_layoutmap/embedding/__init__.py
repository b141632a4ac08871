"""The Cloud TPU embedding API on TPUs, hosts and parameter servers.

Start at `tpu_embedding.py`, which defines `TPUEmbedding`. `configs` reads the
configuration, and `backend.py` defines the interface of the backends. The
packages `tpu`, `host`, `process_sharded` and `servers` each contain one backend.
"""
