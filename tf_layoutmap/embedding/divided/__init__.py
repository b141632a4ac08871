"""Carries a `TPUEmbedding` out with tables divided among processes."""
