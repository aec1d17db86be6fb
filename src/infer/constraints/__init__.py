"""Constraints on the text of outputs: description, checks, compiler, guides, masks, bytes of tokens."""
