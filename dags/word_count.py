"""The Dag of pipeline word_count, run when triggered: how often each word occurs in the text files."""

from tidegate import batch_dag

dag = batch_dag("word_count", schedule=None)
