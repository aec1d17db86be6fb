"""The gated delta rule: attention with a state of fixed size in place of keys and values."""
