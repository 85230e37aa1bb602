"""What runs inside vLLM processes: the plugin, the transfer backend, and the adapter around AsyncLLM."""
