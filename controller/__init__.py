"""The fleet controller. Meets workers only as messages."""
