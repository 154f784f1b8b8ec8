"""Fills an overlay's store with records of stations that do not exist: fill_store.py ETCD COUNT.

Uses etcd's gRPC gateway (JSON over HTTP), which needs nothing but Python.
"""

import base64
import json
import sys
import urllib.request

OPERATIONS = 128
"""Operations in one transaction: etcd's default limit."""


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def main() -> None:
    endpoint, count = sys.argv[1], int(sys.argv[2])
    for start in range(0, count, OPERATIONS):
        puts = []
        for number in range(start, min(count, start + OPERATIONS)):
            mac = "02:99:" + ":".join(f"{byte:02x}" for byte in number.to_bytes(4, "big"))
            value = "nonsense" if number % 2 else '{"host":"h9","sequence":1}'
            puts.append({"requestPut": {"key": encoded(f"/vnet/v1/1/interfaces/{mac}"), "value": encoded(value)}})
        body = json.dumps({"success": puts}).encode()
        urllib.request.urlopen(f"{endpoint}/v3/kv/txn", body, timeout=10).read()


main()
