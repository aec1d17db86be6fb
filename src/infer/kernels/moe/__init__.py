"""Expert matrices: each token through the few experts that its router chose."""
