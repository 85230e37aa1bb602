"""A sidecar of a vLLM server: the same engine as `vllm_server`, asked over the server's own HTTP routes."""
