"""Carries a `TPUEmbedding` out over parameter servers."""
