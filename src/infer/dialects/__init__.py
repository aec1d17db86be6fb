"""Dialects: how each family of models writes its reasoning and its tool calls."""
