"""Sidecar of a `vllm-rs` server, through its gRPC service `vllm.Control`."""
