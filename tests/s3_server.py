"""An S3-compatible server for the tests: moto's, on loopback, in a thread of the test process, with faults on demand.

Keys say what fails: if a key's name begins with ``refused__``, its second part and all later ones get "access denied", which no client
retries. Names in a bucket come from the tests alone, so nothing else is hit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qs

BUCKET = "bucket"

_DENIED = (
    b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>AccessDenied</Code><Message>the test refuses</Message></Error>"
)


class _Faults:
    """WSGI: refuses what a key asks to be refused, gives everything else to the server."""

    def __init__(self, application: Any, changes: list[str]) -> None:
        self._application, self._changes = application, changes

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
            self._changes.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        part = parse_qs(environ.get("QUERY_STRING", "")).get("partNumber", ["0"])[0]
        if environ["REQUEST_METHOD"] == "PUT" and int(part) >= 2 and "/refused__" in environ["PATH_INFO"]:
            left = int(environ.get("CONTENT_LENGTH") or 0)
            while left and (data := environ["wsgi.input"].read(min(left, 1 << 20))):
                left -= len(data)
            start_response(
                "403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(_DENIED)))]
            )
            return [_DENIED]
        found: Iterable[bytes] = self._application(environ, start_response)
        return found


def client(url: str) -> Any:
    """A boto3 client of the server."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )


def empty(url: str) -> None:
    """Removes all objects."""
    store = client(url)
    while found := store.list_objects_v2(Bucket=BUCKET).get("Contents"):
        store.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": item["Key"]} for item in found]})


class Server(NamedTuple):
    """A running server.

    Attributes:
        url: of it, for clients.
        changes: requests that change something, as "PUT /bucket/key", in the order in which they came.
    """

    url: str
    changes: list[str]


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server with an empty bucket in it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for every request otherwise
    changes: list[str] = []
    application = _Faults(DomainDispatcherApplication(create_backend_app), changes)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        client(url).create_bucket(Bucket=BUCKET)
        yield Server(url, changes)
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
