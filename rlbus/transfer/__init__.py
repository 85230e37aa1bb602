"""The data plane: manifests, buckets, checksums, and process groups that carry tensors beside the bus."""
