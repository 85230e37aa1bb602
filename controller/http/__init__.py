"""The controller's HTTP side: discovery as Dynamo answers it, and vLLM's RL verbs on the whole fleet as one op."""
