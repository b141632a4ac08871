"""`tlm.export`: models whose tables are small and quickly looked up."""
