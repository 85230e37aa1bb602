"""What every test may rely on, wherever it is run from."""

import signal

# A shell starts what it runs in the background with Ctrl-C ignored, and every process below inherits that: there a test
# that interrupts itself, or a program that it started, would wait in vain. The default is what a terminal gives.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
