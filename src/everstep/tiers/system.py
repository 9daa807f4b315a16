"""The system calls that change a disk, as a seam: tests make the N-th one fail, kill, or forget."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)


class System:
    """The system calls that a Disk makes. Errors are OSError."""

    written = 0
    """How many bytes were written so far, about: threads count beside each other."""

    close = staticmethod(os.close)
    fsync = staticmethod(os.fsync)
    link = staticmethod(os.link)  # not over what is there
    rename = staticmethod(os.rename)  # over what is there, at once
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """open(2)."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        """pwrite(2); releases the GIL."""
        count = os.pwrite(fd, data, offset)
        self.written += count
        return count

    def allocate(self, fd: int, size: int) -> None:
        """fallocate(2): reserve `size` bytes, so that a full disk says so before the writes."""
        if _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def mkdir(self, path: str) -> None:
        """mkdir(2), for the owner only."""
        os.mkdir(path, 0o700)
