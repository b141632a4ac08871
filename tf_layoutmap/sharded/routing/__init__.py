"""Which shard owns which row of a read or write, and which op serves it."""
