"""Proposals of several next tokens, which a step of the model then judges."""
