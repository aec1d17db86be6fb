"""Middleware that every request passes through: limits, keys, hosts, log."""
