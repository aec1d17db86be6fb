"""Conversion of bodies to requests and outputs to bodies, in formats that clients depend on exactly."""
