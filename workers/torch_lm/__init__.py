"""A small real causal language model in plain torch, with generation and a completions endpoint."""
