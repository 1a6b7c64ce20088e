"""Tables of Postgres, as a source."""
