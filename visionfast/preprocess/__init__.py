"""Image bytes → the network's input tensor. `reference` and `decode_reference` are the definitions."""
