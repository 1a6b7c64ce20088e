"""A source of several inputs, whose positions move under one txid, and of references that each batch is joined with."""
