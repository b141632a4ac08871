"""A table in shards in checkpoints and SavedModels."""
