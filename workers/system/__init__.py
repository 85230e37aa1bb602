"""The HTTP surface of a worker, on its `system_url`."""
