"""Measurements of devices, as numbers: a file for each kind of device that has been measured."""
