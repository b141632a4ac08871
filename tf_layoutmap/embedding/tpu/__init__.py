"""Carries a `TPUEmbedding` out on a TPU, by TensorFlow's own operations."""
