"""A source of several inputs, whose slices share one batch and txid, and of references that each batch is joined with."""
