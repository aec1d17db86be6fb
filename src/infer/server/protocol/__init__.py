"""Bodies to requests, outputs to bodies: what clients depend on byte by byte."""
