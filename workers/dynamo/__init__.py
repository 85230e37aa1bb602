"""Workers of NVIDIA Dynamo as workers of rlbus: a sidecar that adopts a whole Dynamo fleet."""
