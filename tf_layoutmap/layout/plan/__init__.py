"""From the names of variables to layouts; allocates nothing."""
