"""Models and their engines: start, watch, route, stop."""
