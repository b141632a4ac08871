"""Carries a `TPUEmbedding` out on the host, by our own engine."""
