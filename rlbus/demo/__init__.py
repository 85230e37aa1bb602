"""The demo: a trainer that learns, engines that generate, weights that reach them only through rlbus."""
