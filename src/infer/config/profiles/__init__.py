"""Measured numbers of devices: a file for each kind of device that has been measured."""
