"""A plain training loop that keeps a fleet of engines in step, without asyncio.

Try it: `rlbus up` in one terminal; export the RLBUS_URL that it prints; `rlbus worker torch DIR` in another; then
`python examples/train_loop.py DIR`, with the same DIR (`python -m rlbus.workers.torch_lm.make DIR` makes a tiny one).
"""
