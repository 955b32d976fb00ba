"""Like ``tee -a FILE``, for the log of a server that never ends: FILE is rotated, so its volume can't fill.

    keep.py FILE [MAX_BYTES]        standard input to standard output, and to FILE

FILE becomes FILE.1 at MAX_BYTES (32 MiB), after a whole line; the FILE.1 before is deleted. Renaming
loses nothing for whoever follows the file; copying and truncating would. The server comes first: a
file that can't be written costs the file, not the server, and is tried again with the next block.
Runs with the Python of the vLLM image and nothing else.
"""

import os
import signal
import sys

BLOCK = 64 << 10  # what a pipe holds
MAX_BYTES = 32 << 20


class Kept:
    """The file, opened when there is something to write."""

    def __init__(self, path, max_bytes):
        self.path = path
        self.max_bytes = max_bytes
        self.fd = None
        self.size = 0
        self.said = None

    def write(self, data):
        """Append; what the file does not take is lost for the file only."""
        try:
            if self.fd is None:
                self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                os.fchmod(self.fd, 0o644)  # whatever the umask: the exporter is another user
                self.size = os.fstat(self.fd).st_size
            end = data.rfind(b"\n") + 1
            if end and self.size + end >= self.max_bytes:
                self.put(data[:end])
                os.close(self.fd)
                self.fd = None
                os.replace(self.path, self.path + ".1")  # noqa: PTH105 - pathlib would double the memory
                if data[end:]:
                    self.write(data[end:])
            else:
                self.put(data)
            self.said = None
        except OSError as error:
            if self.said != error.errno:  # once, not with every block
                self.said = error.errno
                complain = f"keep.py: {self.path}: {error.strerror}; the log goes to standard output only\n"
                copy(2, complain.encode())

    def put(self, data):
        """Append all of it."""
        while data:
            written = os.write(self.fd, data)
            self.size += written
            data = data[written:]


def copy(fd, data):
    """Write all of it, or nothing more if nobody reads there any longer."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def main(arguments):
    """Copy to the end of standard input; returns an exit code."""
    # a signal to the whole group is for the server; this ends when the server has said its last
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    try:
        path, max_bytes = arguments[0], int(arguments[1]) if arguments[1:] else MAX_BYTES
    except (IndexError, ValueError):
        copy(2, b"usage: keep.py FILE [MAX_BYTES]; MAX_BYTES is a number\n")
        return 2
    kept = Kept(path, max_bytes)
    while True:
        data = os.read(0, BLOCK)
        if not data:
            return 0
        copy(1, data)
        kept.write(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
