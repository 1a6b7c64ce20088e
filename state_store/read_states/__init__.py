"""Reading the rows of states: for programs, named queries and transforms."""
