"""What every request passes through: limits, keys, hosts, log."""
