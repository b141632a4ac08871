"""The backend that runs `TPUEmbedding` on a TPU with TensorFlow's TPU ops.

Start with `backend.py`, which implements the steps of `TPUEmbedding`.
"""
