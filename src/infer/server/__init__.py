"""HTTP in front of the engine: OpenAI's routes, exact on the wire."""
