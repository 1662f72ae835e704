"""World-side models: frame codec, causal DiT, context model."""
