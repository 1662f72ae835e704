"""The autoregressive context model: token layout, Llama network, KV-cached decoding."""
