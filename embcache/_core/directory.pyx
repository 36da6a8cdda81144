"""The directory of a file-backed table: its files, its lock, and whether what is in it may be used.

Owns the descriptors and the header; the table owns what is in the data file. A directory holds

=============  ========================================================================================================
file           content
=============  ========================================================================================================
``header``     512 bytes: magic ``EMBCTBL\\n``; uint32 format version, state (1 clean, 2 dirty), byte order, page size;
               uint64 sequence; length and XXH3-64 of the identity; length of ``data``; length and XXH3-64 of ``metadata``
               and of ``filter``; zeros; XXH3-64 of the bytes before. Then the identity: JSON, what the table is
``data``       columns of rows and arrays of the indexes, mapped (ec_backing.h)
``metadata``   partitions, extents, free lists: the table's small numbers at the last flush (ec_metadata.h)
``filter``     the planner's own state of this table at the last flush; empty for a table without one
``lock``       number of the process that has the directory open, as text; for messages only
``checkpoint`` what `note_checkpoint` was told; may be absent
=============  ========================================================================================================

Invariants: at most one object of one process has a directory open (``flock`` on the directory itself); a file is never
mapped before its length is known to be right; a directory that is refused is left as it was. How the header makes a
crash at any instruction harmless: ec_directory.h. docs/decisions/008 says why it is so.

Fork: a child shares the lock through its copies of the descriptors, so it closes them at once and never unlocks; its
end therefore frees nothing, and its parent's does.

Thread safety: none of its own; the table's lock covers it.
"""

import contextlib
import errno
import fcntl
import os
import stat
import weakref

from embcache.errors import (
    ConfigError,
    CorruptionError,
    DiskFullError,
    ForkError,
    FormatVersionError,
    LockedError,
    StorageError,
    UncleanDirectoryError,
)

from cython cimport final
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memset
from posix.unistd cimport getpid

from embcache._core.digest cimport ec_xxh3
from embcache._core.threads cimport process_mark, process_number

cdef extern from "<sys/file.h>" nogil:
    const int LOCK_UN
    int flock(int fd, int operation)

cdef extern from "<unistd.h>" nogil:
    int close_descriptor "close"(int descriptor)

cdef extern from "<sys/vfs.h>" nogil:
    ctypedef struct statfs_t "struct statfs":
        long f_type
    int fstatfs(int fd, statfs_t *status)

cdef extern from "ec_directory.h":
    const int EC_FORMAT_VERSION
    const int EC_BYTE_ORDER
    const int EC_CLEAN
    const int EC_DIRTY

    ctypedef struct ec_header:
        char magic[8]
        unsigned int format, state, byte_order, page_bytes
        uint64_t sequence, identity_bytes, identity_digest, data_bytes
        uint64_t metadata_bytes, metadata_digest, filter_bytes, filter_digest
        uint64_t digest

    void ec_header_fill(const ec_backing *b, unsigned int state, ec_header *h) noexcept nogil

FORMAT_VERSION = EC_FORMAT_VERSION

cdef enum:
    SECTOR = 512
    MOST_IDENTITY = 1 << 24

_FILES = ("data", "metadata", "filter")
_OWN = (*_FILES, "header", "header.new", "lock", "checkpoint", "checkpoint.new")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMOTE = {0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "CIFS", 0xFE534D42: "SMB"}

_open = weakref.WeakSet()


def _leave_to_parent():
    """In a forked child: close the copies of the parent's descriptors, and with them the child's share of the locks."""
    for directory in list(_open):
        directory.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


def _digest(const unsigned char[::1] content not None):
    return ec_xxh3(&content[0] if content.shape[0] else NULL, content.shape[0], 0)


def _file_error(str owner, str path, str doing, int number, int64_t need=0, bint opening=False):
    """The exception for an errno of the file system; while `opening`, some say that the path is wrong."""
    reason = os.strerror(number)
    if number in _FULL:
        try:
            status = os.statvfs(path)
            free = status.f_bavail * status.f_frsize
        except OSError:
            free = -1
        wanted = f"{need} bytes more" if need else "room for a small write"
        have = f"{free} bytes are free there" if free >= 0 else "how much is free there is unknown"
        limit = "; a quota, or the limit on a file's size (RLIMIT_FSIZE), may be in the way" if number != errno.ENOSPC else ""
        return DiskFullError(number, f"{owner}: {doing} needs {wanted}, and {have}{limit}; nothing has changed: free some and try again", path)
    if opening and number in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EEXIST, errno.ELOOP):
        return ConfigError(f"{owner}: directory {path!r}: {doing}: {reason}; give the path of a directory, or of one to make inside an existing one")
    if number in (errno.EMFILE, errno.ENFILE):
        reason += "; a table in files keeps two descriptors: raise the limit of open files (ulimit -n), or close tables"
    return StorageError(number, f"{owner}: {doing}: {reason}", path)


cdef int _see_that_a_descriptor_is_left() except -1:
    """OSError where none is: a directory that was made then could not be locked, and only who has it locked may remove it."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
    return 0


cdef int _give_up(Directory directory) except -1:
    """After a failed start: leave nothing behind that was not there."""
    if directory.made and directory.locked:
        for name in _OWN:  # by name: to list them takes a descriptor, and there may be none left
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory.backing.folder)
        with contextlib.suppress(OSError):
            os.rmdir(directory.path)
    directory.drop()
    return 0


@final
cdef class Directory:
    """A table's directory, made if it is absent, locked, its header read and found clean.

    Parameters
    ----------
    path : path-like
        The directory itself; what contains it must exist.
    owner : str
        Whose it is, for messages.

    Raises
    ------
    ConfigError
        It cannot be a table's directory: a file, a place that does not exist, a directory of something else, or a file
        system of another machine.
    LockedError
        It is open, in this process or another.
    UncleanDirectoryError
        It was changed after the last flush and never closed.
    CorruptionError, FormatVersionError
        Its header is damaged or of another version, or a file is missing or has not the length that the header says.
    DiskFullError, StorageError
        The file system refuses.
    """

    def __cinit__(self):
        ec_backing_init(&self.backing)
        self.process = process_mark()
        self.made = 0
        self.locked = 0

    def __init__(self, path, str owner not None):
        if self.owner is not None:
            raise ConfigError(f"{self.owner}: directory {self.path!r}: already opened; make a new Directory")
        try:
            given = os.fsdecode(path)
        except TypeError:
            raise ConfigError(f"{owner}: directory = {path!r}; give a path") from None
        if not given or "\0" in given:
            raise ConfigError(f"{owner}: directory = {given!r}; give a path")
        self.owner = owner
        self.path = os.path.abspath(given)
        try:
            _see_that_a_descriptor_is_left()
            try:
                os.mkdir(self.path)
                self.made = 1
            except FileExistsError:
                pass
            self.backing.folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _open.add(self)
            self.check_file_system()
            self.lock()
            self.read_header()
        except OSError as error:
            _give_up(self)
            if isinstance(error, (DiskFullError, StorageError)):
                raise
            raise _file_error(owner, self.path, "opening it", error.errno or errno.EIO, opening=True) from error
        except BaseException:
            _give_up(self)
            raise

    def __dealloc__(self):
        if self.process == process_mark():
            self.drop()

    # ------------------------------------------------------------------------------------------------------------ opening

    def open_file(self, str name, int flags):
        """Descriptor of a regular file of the directory."""
        descriptor = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=self.backing.folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self.damaged(f"{name!r} is not a regular file")
        return descriptor

    def read_file(self, str name, int64_t most):
        """The bytes of a file; at most `most`."""
        descriptor = self.open_file(name, os.O_RDONLY)
        with open(descriptor, "rb") as file:
            return file.read(most)

    def damaged(self, what):
        return CorruptionError(f"{self.owner}: directory {self.path!r}: {what}; it is not used, and nothing was changed: restore {self.remedy()}")

    def remedy(self):
        checkpoint = self.checkpoint()
        return f"the last checkpoint ({checkpoint}) into a new directory" if checkpoint else "the last checkpoint, or a copy, into a new directory"

    def checkpoint(self):
        """What `note_checkpoint` was told last, or None."""
        try:
            return self.read_file("checkpoint", 4096).decode("utf-8", "replace").strip() or None
        except (OSError, CorruptionError):
            return None

    cdef int check_file_system(self) except -1:
        """ConfigError for file systems whose locks and full disks are another machine's."""
        cdef statfs_t status
        memset(&status, 0, sizeof(status))
        if fstatfs(self.backing.folder, &status) == 0 and status.f_type & 0xFFFFFFFF in _REMOTE:
            raise ConfigError(f"{self.owner}: directory {self.path!r} is on {_REMOTE[status.f_type & 0xFFFFFFFF]}, where neither locks nor "
                              "space can be relied on; give a directory on a local file system")

    cdef int lock(self) except -1:
        try:
            fcntl.flock(self.backing.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            self.locked = 1
            return 0
        try:
            holder = int(self.read_file("lock", 32))
        except (OSError, ValueError, CorruptionError):
            holder = None
        who = "another process" if holder is None else "this process" if holder == getpid() else f"process {holder}"
        raise LockedError(f"{self.owner}: directory {self.path!r} is open in {who}; close the table there first", pid=holder)

    cdef int read_header(self) except -1:
        cdef ec_header header
        cdef const unsigned char[::1] content
        cdef ec_backing *b = &self.backing
        names = os.listdir(b.folder)
        if "header" not in names:
            strangers = sorted(set(names) - set(_OWN))
            if strangers:
                raise ConfigError(f"{self.owner}: directory {self.path!r} is no table's, and holds {strangers[:3]}; give an empty or a new one")
            if any(name in names and os.stat(name, dir_fd=b.folder, follow_symlinks=False).st_size for name in _FILES):
                raise self.damaged("its header is missing")
            return 0
        raw = self.read_file("header", SECTOR + MOST_IDENTITY)
        if len(raw) < SECTOR or raw[:8] != b"EMBCTBL\n":
            raise self.damaged("its header is cut short or is none")
        content = raw[:SECTOR]
        memcpy(&header, &content[0], SECTOR)
        if header.format != EC_FORMAT_VERSION:
            raise FormatVersionError(f"{self.owner}: directory {self.path!r} has format {header.format}; this version reads {EC_FORMAT_VERSION}; "
                                     "open it with the version of embcache that wrote it")
        if ec_xxh3(&header, SECTOR - sizeof(uint64_t), 0) != header.digest or header.state not in (EC_CLEAN, EC_DIRTY):
            raise self.damaged("its header does not match its digest")
        identity = raw[SECTOR:]
        if <uint64_t>len(identity) != header.identity_bytes or _digest(identity) != header.identity_digest:
            raise self.damaged("the description of the table in its header does not match its digest")
        if header.byte_order != EC_BYTE_ORDER or header.page_bytes != os.sysconf("SC_PAGESIZE"):
            raise FormatVersionError(f"{self.owner}: directory {self.path!r} was written with pages of {header.page_bytes} bytes or another byte "
                                     f"order; this machine has {os.sysconf('SC_PAGESIZE')}; move the rows with a checkpoint")
        if header.state != EC_CLEAN:
            checkpoint = self.checkpoint()
            raise UncleanDirectoryError(
                f"{self.owner}: directory {self.path!r} was changed after its last flush and not closed: what is in it is unknown; delete it and "
                f"restore {self.remedy()}", directory=self.path, checkpoint=checkpoint)
        for name, length in zip(_FILES, (header.data_bytes, header.metadata_bytes, header.filter_bytes)):
            if name not in names:
                raise self.damaged(f"file {name!r} is missing")
            found = os.stat(name, dir_fd=b.folder, follow_symlinks=False).st_size
            if found != length:
                raise self.damaged(f"file {name!r} has {found} bytes; its header says {length}")
        import json  # not at the top: most tables are in memory, and importing it takes a while

        try:
            self.identity = json.loads(identity)
        except ValueError:
            raise self.damaged("the description of the table in its header is not JSON") from None
        b.data = self.open_file("data", os.O_RDWR)
        b.length = header.data_bytes
        b.clean = 1
        b.sequence = header.sequence
        b.identity_bytes = header.identity_bytes
        b.identity_digest = header.identity_digest
        b.metadata_bytes = header.metadata_bytes
        b.metadata_digest = header.metadata_digest
        b.filter_bytes = header.filter_bytes
        b.filter_digest = header.filter_digest
        self.sign()
        return 0

    def sign(self):
        """Say who has the directory. It is only for messages: nothing fails when it cannot be written."""
        try:
            with open(self.open_file("lock", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                file.write(f"{getpid()}\n")
        except (OSError, CorruptionError):
            pass

    def create(self, identity):
        """Make the files of an empty table, clean and durable.

        Parameters
        ----------
        identity : dict
            What the table is; JSON.
        """
        import json

        cdef ec_header header
        cdef ec_backing *b = &self.backing
        if self.identity is not None:
            raise ConfigError(f"{self.owner}: directory {self.path!r} holds a table already")
        body = json.dumps(identity, sort_keys=True).encode()
        try:
            for name in _FILES:
                descriptor = self.open_file(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                os.fsync(descriptor)
                if name == "data":
                    b.data = descriptor
                else:
                    os.close(descriptor)
            b.identity_bytes = len(body)
            b.identity_digest = _digest(body)
            b.metadata_digest = b.filter_digest = _digest(b"")
            b.sequence = 1
            ec_header_fill(b, EC_CLEAN, &header)
            with open(self.open_file("header.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write((<const unsigned char *>&header)[:SECTOR] + body)
                file.flush()
                os.fsync(file.fileno())
            os.rename("header.new", "header", src_dir_fd=b.folder, dst_dir_fd=b.folder)
            os.fsync(b.folder)
            if self.made:
                self.sync_parent()
        except OSError as error:
            _give_up(self)
            raise _file_error(self.owner, self.path, "making its files", error.errno or errno.EIO, opening=True) from error
        b.clean = 1
        self.identity = identity
        self.sign()

    def sync_parent(self):
        descriptor = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------------------------------------------- while open

    @property
    def clean(self):
        """Whether the directory holds exactly the table's content, durably."""
        return bool(self.backing.clean)

    @property
    def failed(self):
        """Whether a sync failed or the directory is gone, so that the table can be read but neither changed nor flushed."""
        return bool(self.backing.failed)

    @property
    def nbytes(self):
        """Bytes of the files."""
        return self.backing.length + self.backing.metadata_bytes + self.backing.filter_bytes + self.backing.identity_bytes + SECTOR

    def checked(self, str name, uint64_t length, uint64_t digest):
        try:
            content = self.read_file(name, length + 1)
        except OSError as error:
            raise _file_error(self.owner, self.path, f"reading {name!r}", error.errno or errno.EIO) from error
        if <uint64_t>len(content) != length or _digest(content) != digest:
            raise self.damaged(f"file {name!r} does not match its digest")
        return content

    def metadata(self):
        """The bytes of the file of that name, checked."""
        return self.checked("metadata", self.backing.metadata_bytes, self.backing.metadata_digest)

    def filter_state(self):
        """The bytes that the planner gave to the last flush, checked."""
        return self.checked("filter", self.backing.filter_bytes, self.backing.filter_digest)

    def release_pages(self):
        """Give back the memory that mapped pages of the data file take; they are read again when somebody looks.

        For those who go once through a table that may exceed memory. Thread safety: others may use the table meanwhile, but not close it.
        """
        if self.process == process_mark():
            with nogil:
                ec_backing_release(&self.backing)

    def note_checkpoint(self, str text not None):
        """Say which checkpoint holds this table's rows: what a refusal of the directory will name.

        Parameters
        ----------
        text : str
            One line, for people: a path and a generation.
        """
        if self.process != process_mark():
            raise ForkError(f"{self.owner}: opened in process {process_number(self.process)}, used in its forked child {getpid()}")
        folder = self.backing.folder
        try:
            with open(self.open_file("checkpoint.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(text.encode("utf-8", "replace") + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename("checkpoint.new", "checkpoint", src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except OSError as error:
            raise _file_error(self.owner, self.path, "noting a checkpoint", error.errno or errno.EIO) from error

    cdef object refusal(self):
        cdef ec_backing *b = &self.backing
        name = "" if b.file == NULL else b.file.decode()
        if b.gone:
            return StorageError(errno.ENOENT, f"{self.owner}: directory {self.path!r} was deleted or lost its file {name!r} while open: the table can be read "
                                f"but no longer changed or flushed; copy what you need, close it and restore {self.remedy()}", self.path)
        if b.failed:
            return StorageError(b.error, f"{self.owner}: syncing {name!r} failed ({os.strerror(b.error)}): what is on the disk is unknown, so the "
                                f"table can be read but no longer changed or flushed; copy what you need, delete the directory and restore {self.remedy()}",
                                self.path)
        return _file_error(self.owner, self.path, f"writing {name!r}", b.error, b.need)

    def fail_after(self, int64_t calls, int error):
        """For tests: let `calls` calls of the system succeed and the next one fail with errno `error`.

        EC_FAULT_KILL (-9) ends the process there instead. Negative `calls`: off.
        """
        self.backing.fault_error = error
        self.backing.fault_countdown = calls

    # ------------------------------------------------------------------------------------------------------------- the end

    def leave(self):
        """In a forked child: close what is a copy of the parent's. The mappings do not exist there, the lock is the parent's."""
        if self.process != process_mark():
            close_descriptor(self.backing.data)
            close_descriptor(self.backing.folder)
            self.backing.data = self.backing.folder = -1

    cdef void drop(self) noexcept:
        """Unmap, unlock and close; the files stay as they are."""
        ec_backing_unmap(&self.backing)
        if self.backing.data >= 0:
            close_descriptor(self.backing.data)
        if self.backing.folder >= 0:
            flock(self.backing.folder, LOCK_UN)  # closing would not do while a child has a copy (forked behind Python's back)
            close_descriptor(self.backing.folder)
        self.backing.data = self.backing.folder = -1
        self.backing.clean = 0
        self.locked = 0
