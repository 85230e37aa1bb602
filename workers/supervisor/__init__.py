"""What runs a worker's process from outside: starts it, hears it, and starts it again when it dies or hangs."""
