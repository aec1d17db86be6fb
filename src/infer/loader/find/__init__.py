"""Finding a model's files: a path, a hub id, or the default model."""
