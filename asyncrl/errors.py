"""The exception tree.

Every error names the rule that was broken, the value that was met and how to mend it.
Each class is also a standard-library type, so that callers may catch either, and carries
its identifiers as attributes; all of them survive pickling.
"""

from __future__ import annotations

from typing import Any


class AsyncRLError(Exception):
    """Root of every error that asyncrl raises on purpose.

    Args:
        message: rule, value met, and the fix.
        **ids: identifiers of what failed (``group_id``, ``policy_version``, ``endpoint``, …).
    """

    def __init__(self, message: str, **ids: Any) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.ids))

    def __getattr__(self, name: str) -> Any:
        ids = self.__dict__.get("ids", {})
        if name in ids:
            return ids[name]
        raise AttributeError(name)


def _rebuild(cls: type[AsyncRLError], message: str, ids: dict[str, Any]) -> AsyncRLError:
    return cls(message, **ids)


class ConfigError(AsyncRLError, ValueError):
    """A setting that is unknown, out of range, ineffective or cannot live."""


class UnsupportedError(ConfigError):
    """A combination that this version refuses, with the nearest one that works."""


class DataError(AsyncRLError, ValueError):
    """A prompt row, reward or trajectory that cannot be used."""


class SchemaError(DataError):
    """Bytes on the wire that do not follow the trajectory schema."""


class VersionError(AsyncRLError, ValueError):
    """A policy version went backwards, or a staleness came out negative or beyond its bound."""


class QueueError(AsyncRLError, RuntimeError):
    """The queue refused a request."""


class UnknownSession(QueueError):
    """The broker doesn't know the caller: it was started again, and a hello comes first."""


class LostMessage(QueueError):
    """Messages of the caller were lost on the way to the broker: a hello carries its numbers on, and then it asks anew."""


class DiskFull(AsyncRLError, OSError):
    """The disk of a folder has no room for what is to be written; nothing of it was kept."""


class FencedError(QueueError):
    """The caller belongs to a learner incarnation that has been replaced."""


class SyncError(AsyncRLError, RuntimeError):
    """A weight update failed in one of its phases."""


class EngineError(AsyncRLError, RuntimeError):
    """A learner or generator engine failed."""


class ProcessDied(AsyncRLError, RuntimeError):
    """A process of the run is gone."""


class StopRequested(AsyncRLError, RuntimeError):
    """The user asked for an orderly stop while something was still being waited for."""


class PeerTimeout(AsyncRLError, TimeoutError):
    """A deadline passed while waiting for another process."""
