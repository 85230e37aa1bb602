"""rlbus: keeps a fleet of LLM inference engines in step with a trainer, over NATS."""
