"""Worker agents and engine adapters. Meets the controller only as messages."""
