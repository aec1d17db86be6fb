"""From logits to token ids on the device."""
