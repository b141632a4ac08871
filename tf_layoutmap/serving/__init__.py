"""`tlm.export`, which writes SavedModels with compact tables."""
