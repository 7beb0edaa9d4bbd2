"""Exit with 0 if GET HOST:PORT/PATH answers 200.

python -IS healthy.py HOST:PORT/PATH: without site-packages it costs little, every few seconds.
"""

import http.client
import sys

host, _, path = sys.argv[1].partition("/")
connection = http.client.HTTPConnection(host, timeout=5)
connection.request("GET", f"/{path}")
sys.exit(0 if connection.getresponse().status == 200 else 1)
