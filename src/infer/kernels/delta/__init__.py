"""The gated delta rule: attention with a state of fixed size instead of keys and values."""
