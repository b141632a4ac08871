"""Routes reads and writes of rows to the shards that own the rows."""
