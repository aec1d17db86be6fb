"""What was measured on a device, as numbers: a file for each kind of device that has been measured."""
