"""An object store as a tier: a prefix of a bucket (S3, Google's, Azure's), by obstore.

An object appears whole or not at all, and is durable when the put was acknowledged: so there is
nothing to sync. Data goes by multipart under names that are new; documents that must appear once by
a conditional create. A retried create may meet its own success: what lies there then is compared.

There are no locks. Who deletes must know that nobody writes: see store/retain.py.
"""

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from everstep.errors import Missing, Unavailable, Unsupported
from everstep.tiers.files import EXTENT_BYTES, Await, check_document, cut_short, extents_of
from everstep.tiers.objects import Objects, Url

_PART_BYTES = 8 << 20
_PARTS_IN_FLIGHT = 8
_PARTS_MAX = 9_000  # S3 takes 10,000
PATIENCE_S = 100.0
_ADVICE = {
    "://169.254.": ". No credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "403 Forbidden": ". The credentials are wrong, or do not allow it",
    "401 Unauthorized": ". Are the credentials set (AWS_ACCESS_KEY_ID, a profile, ...)?",
    "NoSuchBucket": ". There is no such bucket: make it first",
}
"""By what stands in the client's message; the first that does."""


class Bucket(Objects):
    """A tier in an object store, rooted at a URL such as s3://bucket/run. Thread-safe.

    Credentials and endpoint are the ones that every client of that store takes: AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ALLOW_HTTP and so on. See Disk for what methods promise.
    """

    level = "remote"
    """Of what is committed there."""

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: for how long a call is tried again. Raises Unsupported for a URL of an
        unknown kind, and where obstore is not installed."""
        self.root = Url(url.rstrip("/"))
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise Unsupported(
                f"opening {url}: object stores need obstore. pip install 'everstep[remote]'"
            ) from error
        self._api, self._errors, self._from_url = obstore, exceptions, from_url
        retries = {"max_retries": 1000, "retry_timeout": timedelta(seconds=patience_s)}
        try:
            self._store = from_url(self.root, retry_config=retries)
            self._impatient = from_url(self.root, retry_config={**retries, "max_retries": 1})
        except (exceptions.BaseError, ValueError) as error:
            what = str(error).partition("\n")[0]
            raise Unsupported(f"opening {url}: {what}. Say s3://, gs:// or az://") from error
        self._creates_once = False
        self.written = 0
        """See Disk; of a large object what its upload has taken."""
        self._offset_s = 0.0
        """How far the server's clock is ahead, as far as that is known."""

    def stream(self, path: str, pieces: Iterable[memoryview], size: int) -> None:
        part_bytes = max(_PART_BYTES, -(-size // _PARTS_MAX))
        with (
            self._telling("writing", path, size),
            self._api.open_writer(
                self._store, path, buffer_size=part_bytes, max_concurrency=_PARTS_IN_FLIGHT
            ) as upload,
        ):
            for piece in pieces:
                upload.write(piece)
                self.written += len(piece)

    def share(self, other: object, path: str) -> bool:
        """Let the server copy the other's object of that path. False where it is in another bucket,
        or the server does not do it (S3: of more than 5 GB). Raises Missing."""
        if not isinstance(other, Bucket):
            return False
        here, there = urlsplit(self.root), urlsplit(other.root)
        if here[:2] != there[:2]:
            return False
        with self._telling("copying", path, 0):
            try:
                whole = self._from_url(f"{here.scheme}://{here.netloc}")
                self._api.copy(whole, f"{there.path[1:]}/{path}", f"{here.path[1:]}/{path}")
            except self._errors.NotFoundError:
                raise
            except self._errors.BaseError:
                return False
        return True

    @contextmanager
    def new_file(self, path: str, size: int = 0) -> Iterator["Upload"]:
        upload = Upload(self, path)
        try:
            with self._telling("writing", path, size):
                yield upload
        except BaseException:
            upload.abandon()
            raise

    def create(self, path: str, data: bytes) -> bool:
        self._probe()
        with self._telling("creating", path, len(data)):
            return self._create(path, data)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._api.put(self._store, path, data, mode="create")
        except self._errors.AlreadyExistsError:
            return self.read(path) == data  # by a try whose answer was lost
        return True

    def _probe(self) -> None:
        """Whether the server creates conditionally; and what its clock says. Raises Unsupported,
        Unavailable."""
        if self._creates_once:
            return
        path = f"probes/{secrets.token_hex(8)}"
        try:
            with self._telling("trying to create", path, 0):
                creates = not self._refuses_to_create(path) and self._create(path, b"first")
                creates = creates and not self._create(path, b"again")
                if creates:
                    there: datetime = self._api.head(self._store, path)["last_modified"]
                    self._offset_s = there.timestamp() - time.time()
        except Missing as error:
            raise Unavailable(f"{error}. Make the bucket first") from error
        finally:
            self.forget([path])
        if not creates:
            raise Unsupported(
                f"saving to {self.root}: this server has no conditional writes, so that two "
                f"writers would not notice each other. It can be read from; save to another one"
            )
        self._creates_once = True

    def _refuses_to_create(self, path: str) -> bool:
        """Some servers say that they cannot, which a patient client takes for an outage."""
        try:
            self._api.put(self._impatient, path, b"first", mode="create")
        except self._errors.NotSupportedError:
            return True
        except self._errors.BaseError as error:
            return "501 Not Implemented" in str(error)
        return False

    def replace(self, path: str, data: bytes) -> None:
        with self._telling("replacing", path, len(data)):
            self._api.put(self._store, path, data)

    def size(self, path: str) -> int | None:
        try:
            with self._telling("looking for", path, 0):
                return int(self._api.head(self._store, path)["size"])
        except Missing:
            return None

    def now(self) -> float:
        """The time by the server's clock; by this one's where nothing can be written there."""
        with contextlib.suppress(Unsupported, Unavailable):
            self._probe()
        return time.time() + self._offset_s

    def read(self, path: str) -> bytes:
        """See Disk; by one request."""
        with self._telling("reading", path, 0):
            found = self._api.get(self._store, path)
            check_document(self.root / path, found.meta["size"])
            return bytes(found.bytes())

    def read_range(self, path: str, offset: int, view: memoryview) -> None:
        with self._telling("reading", path, len(view)):
            found = self._api.get_range(self._store, path, start=offset, length=len(view))
        if len(found) != len(view):
            raise cut_short(self.root / path, offset + len(found), len(view) - len(found))
        view[:] = memoryview(found)

    def list(self, directory: str) -> list[str]:
        found = self._list(directory)
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def files(self, directory: str) -> dict[str, tuple[int, float]]:
        return {
            each["path"].rpartition("/")[2]: (each["size"], each["last_modified"].timestamp())
            for each in self._list(directory)["objects"]
        }

    def _list(self, directory: str) -> Any:
        with self._telling("listing", directory, 0):
            return self._api.list_with_delimiter(self._store, directory or None)

    def holders(self, directory: str, name: str) -> Sequence[str]:
        """See Disk; by one listing of all that is below."""
        with self._telling("listing", directory, 0):
            chunks = self._api.list(self._store, f"{directory}/", chunk_size=1000)
            paths = [each["path"] for chunk in chunks for each in chunk]
        ending = f"/{name}"
        return sorted(
            path.removesuffix(ending).rpartition("/")[2] for path in paths if path.endswith(ending)
        )

    def delete(self, path: str) -> None:
        with contextlib.suppress(Missing), self._telling("deleting", path, 0):
            self._api.delete(self._store, path)

    def forget(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(Unavailable):
                self.delete(path)

    @contextmanager
    def _telling(self, verb: str, path: str, size: int) -> Iterator[None]:
        what = f"{verb} {self.root / path}"
        try:
            yield
        except (self._errors.NotFoundError, FileNotFoundError) as error:
            raise Missing(f"{what}: there is no such object, or no such bucket") from error
        except (self._errors.BaseError, OSError) as error:
            kind = type(error).__name__
            text = " ".join(str(error).split())
            advice = next((advice for part, advice in _ADVICE.items() if part in text), "")
            text = text.partition(" Debug source:")[0][:400]
            raise Unavailable(f"{what} ({size} bytes): {kind}: {text}{advice}") from error


class Upload:
    """A new object. What is written, in whatever order, waits in a temporary file, and is sent when
    it is finished. For one thread."""

    def __init__(self, bucket: Bucket, path: str) -> None:
        self._bucket, self._path = bucket, path
        self._file: tempfile.SpooledTemporaryFile[bytes] | None = None

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` there. Raises OSError."""
        if self._file is None:
            self._file = tempfile.SpooledTemporaryFile(_PART_BYTES)  # noqa: SIM115
        self._file.seek(offset)
        self._file.write(view)

    def fill(self, data: Sequence[memoryview], await_bytes: Await = lambda end: None) -> None:
        """Send all of `data` at once; blocks until it is acknowledged, and durable then. See
        NewFile."""

        def arriving() -> Iterator[memoryview]:
            for extent, offset in extents_of(data):
                await_bytes(offset + len(extent))
                yield extent

        self._bucket.stream(self._path, arriving(), sum(map(len, data)))

    def finish(self) -> None:
        """Make it appear, unless it was sent at once."""
        if self._file:
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
            read = partial(self._file.read, EXTENT_BYTES)
            self._bucket.stream(self._path, map(memoryview, iter(read, b"")), size)
        self.abandon()

    def abandon(self) -> None:
        """Release it; nothing happens to an object that is there."""
        if self._file:
            self._file.close()
        self._file = None
