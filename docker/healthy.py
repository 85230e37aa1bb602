"""A health check without curl: `python healthy.py PORT [PATH]` ends with 0 if this container's server says 200 there."""

import http.client
import sys

# Docker's own limit on a check is longer.
LIMIT_S = 3.0

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=LIMIT_S)
connection.request("GET", sys.argv[2] if len(sys.argv) > 2 else "/health")
response = connection.getresponse()
print(response.status, response.read(200).decode(errors="replace"))
sys.exit(response.status != 200)
