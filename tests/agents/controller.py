"""A controller of faults, as a playbook's is: tells an agent every 0.2 s that it lives, for the faults that it is told
on stdin. Killed, it says nothing any more.

    python controller.py SOCKET TOKEN
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import sys


class Unix(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(5)
        self.sock.connect(sys.argv[1])


def main() -> None:
    faults: list[str] = []
    while True:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            faults.append(line.strip())
        for fault in faults:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = Unix("agent")
                connection.request("POST", f"/v1/faults/{fault}/keepalive", headers={"Authorization": sys.argv[2]})
                connection.getresponse().read()
                connection.close()


if __name__ == "__main__":
    main()
