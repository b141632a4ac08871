"""The Cloud TPU embedding API on TPUs, hosts and parameter servers.

Start at `tpu_embedding.py`, which defines `TPUEmbedding`. `spec` reads the
configuration, `backend.py` defines the interface of the backends, and `tpu`,
`host`, `divided` and `servers` contain one backend each.
"""
