"""What a pipeline declares, as the store sees it: pipelines, states, columns, windows."""
