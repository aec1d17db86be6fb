"""From a name to tensors in their final place."""
