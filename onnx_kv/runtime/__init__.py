"""The runtime: one ONNX Runtime session over a growing KV cache, and the decoder that drives it."""
