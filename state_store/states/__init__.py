"""The tables of states: what they should be, whether they still are, and rows by key."""
