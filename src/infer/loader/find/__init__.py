"""Where a model's files are: a path, a hub id, or the default model."""
