"""Constraints on outputs: compiled, advanced, turned into masks. Only this package sees vocabulary bytes."""
