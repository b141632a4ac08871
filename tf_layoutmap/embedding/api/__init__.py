"""What `TPUEmbedding` offers, over either backend."""
