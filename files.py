"""
Writing to a disk that may be full, in a folder that others may have written to.
"""
import errno
import os
import shutil
import stat


def opened(path, mode):
    """open() for a file of a run. Raises OSError for a link, a pipe or a device in its place."""
    def opener(path, flags):
        # O_NONBLOCK, because a pipe would wait for its other end.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return descriptor
    return open(path, mode, opener=opener)


def remove(path):
    """Remove a file, a link or a whole folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def sync(path):
    """Wait until the disk has a file or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def in_words(error, folder=None):
    """What a person would say of the error that came of writing into a folder."""
    # Of a full disk libraries tell in many ways, and some not at all.
    text = repr(error)
    if getattr(error, "errno", 0) == errno.ENOSPC or "No space left" in text or (
            folder and shutil.disk_usage(folder).free < 1 << 16):
        return "the disk is full"
    if not isinstance(error, OSError) or not error.strerror:
        return text[-300:]
    what = "it is a link" if error.errno == errno.ELOOP else error.strerror
    return f"{error.filename}: {what}" if error.filename else what
