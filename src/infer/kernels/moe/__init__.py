"""Mixture of experts: each token goes through the few experts that its router chose."""
