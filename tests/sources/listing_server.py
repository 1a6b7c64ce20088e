"""Answers ListObjectsV2 for a bucket of any number of objects, which it makes up: run as a process of its own.

S3Proxy reads its whole folder for each page, so that a million objects would take hours. `GET /requests` returns how many
pages were asked for since the last time.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
ENTRY = (
    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{number:032x}&quot;</ETag>"
    "<Size>1000</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


class Listing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    count = 0
    requests = 0

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/requests":
            self._answer(str(Listing.requests))
            Listing.requests = 0
            return
        Listing.requests += 1
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        first = int(after.removeprefix(prefix).split(".")[0]) + 1 if after.startswith(prefix) and after != "" else 0
        last = min(first + PAGE, Listing.count)
        entries = "".join(ENTRY.format(key=escape(f"{prefix}{n:09d}.parquet"), number=n) for n in range(first, last))
        more = last < Listing.count
        token = f"<NextContinuationToken>{prefix}{last - 1:09d}.parquet</NextContinuationToken>" if more else ""
        self._answer(
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>many</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{max(0, last - first)}</KeyCount>"
            f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{entries}{token}</ListBucketResult>"
        )

    def do_PUT(self) -> None:
        Listing.count = int(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer("")

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def _answer(self, text: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Listing).serve_forever()
