"""Decoder language models as pure functions: model, weights, tokenizer, generation, endpoints."""
