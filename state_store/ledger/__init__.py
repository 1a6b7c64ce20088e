"""The ledger: its tables and schema, and what it records of batches, plans and cursors."""
