"""Models and their engines: starting, watching, routing and stopping."""
