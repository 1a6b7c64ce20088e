"""The commit of a batch, and all that it does to the tables of states."""
