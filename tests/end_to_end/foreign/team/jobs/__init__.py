"""A package of another team, which is called as a folder of Tidegate is."""
