"""A health check without curl: `python healthy.py PORT [PATH]` ends with 0 if the server of this container says 200."""

import http.client
import os
import sys

# Docker's own limit on a check is longer.
LIMIT_S = 3.0

# A worker asks for its token on all of its surface; nobody else minds one.
token = os.environ.get("RLBUS_SYSTEM_TOKEN")
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=LIMIT_S)
connection.request(
    "GET",
    sys.argv[2] if len(sys.argv) > 2 else "/health",
    headers={"Authorization": f"Bearer {token}"} if token else {},
)
response = connection.getresponse()
print(response.status, response.read(200).decode(errors="replace"))
sys.exit(response.status != 200)
