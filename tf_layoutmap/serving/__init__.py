"""`tlm.export`: SavedModels with compact tables and fast lookups."""
