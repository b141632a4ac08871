"""The variables of tables and their slot variables."""
