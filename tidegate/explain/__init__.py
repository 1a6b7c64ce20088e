"""Sentences for people: why something waits, what a batch did, what an error asks for."""
