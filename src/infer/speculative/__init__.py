"""Drafts of several next tokens, which one step of the model then verifies."""
