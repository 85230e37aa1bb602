"""Engine adapters: each makes one inference engine look like `base.Engine`."""
