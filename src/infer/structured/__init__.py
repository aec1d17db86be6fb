"""Constraints on the text of outputs: the one part of an engine that sees the bytes of its vocabulary."""
