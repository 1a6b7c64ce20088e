"""What people, reports, the page and metrics read of the ledger."""
