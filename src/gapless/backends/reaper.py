"""Runs one command, and sees to it that nothing of it is left.

Not imported: `stdio.py` runs this file by its path, isolated and without `site` (about 20 ms),
between itself and the MCP server::

    python -I -S reaper.py CONTROL DIRECTORY COMMAND...

DIRECTORY is where the command starts, if not empty. CONTROL is a connected stream socket whose
other end Gapless alone holds. Its end of file, be it Gapless's wish or its death by SIGKILL, makes
the command end: it has `GRACE` seconds to notice that its stdin has ended, `GRACE` more after a
SIGTERM, and is killed then. Whenever the command has ended, what it has left behind in its process
group is killed. stdin, stdout and stderr are the command's own: no byte passes through here.

What is said on CONTROL, a line each: ``started PID`` or ``failed REASON``, then ``exited STATUS``
(negative: the signal that killed it). The reaper's own exit status is the command's, by the customs
of a shell: 128 + n for signal n, 126 or 127 for what could not be started.

A process that leaves the group (`setsid`) is out of reach, as it is for a shell.
"""

import os
import select
import signal
import sys

__all__ = ["GRACE", "main"]

GRACE = 1.0
"""Seconds between two steps of making the command end."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(control: int, directory: str, command: list[str]) -> int:
    """Run `command` in `directory`; returns the exit status that the caller is to exit with."""
    _close_others(control)
    os.set_inheritable(control, False)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    # Caught, not ignored: a caught signal has its default effect again in the command.
    for signum in (signal.SIGCHLD, *FORWARDED):
        signal.signal(signum, _note)
    try:
        os.chdir(directory or ".")
    except OSError as error:
        _tell(control, f"failed {error.strerror}: {directory!r}")
        return 126
    try:
        # Python ignores two signals, which the command must not inherit.
        ignored = (signal.SIGPIPE, signal.SIGXFSZ)
        child = os.posix_spawnp(command[0], command, os.environ, setpgroup=0, setsigdef=ignored)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        _tell(control, f"failed {'not found' if missing else error.strerror}")
        return 127 if missing else 126
    # Copies of the command's pipes would hide from Gapless that the command has closed its own.
    os.close(0)
    os.close(1)
    _tell(control, f"started {child}")
    status = _follow(control, wake, child)
    # At once, while no new process can have the number yet; and before the status is told, so that
    # Gapless, hearing it, knows that all that was written can be read now.
    _kill(child, signal.SIGKILL)
    _tell(control, f"exited {status}")
    return status if status >= 0 else 128 - status


def _follow(control: int, wake: int, child: int) -> int:
    """Wait until the command has ended, of itself or because CONTROL did; returns how."""
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    waiting.register(wake, select.POLLIN)
    steps = [signal.SIGTERM, signal.SIGKILL]
    timeout: float | None = None
    while True:
        ready = [fd for fd, _ in waiting.poll(timeout)]
        if wake in ready:
            for signum in os.read(wake, 512):
                if signum in FORWARDED:
                    _kill(child, signum)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if control in ready:  # nothing is ever sent this way: it is the end of file
            waiting.unregister(control)
            timeout = GRACE * 1000
        elif not ready:
            _kill(child, steps.pop(0))
            timeout = GRACE * 1000 if steps else None


def _close_others(control: int) -> None:
    """Close what uvloop lets slip through: a copy of a pipe, held by whom it is not for, hides its end."""
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd != control:
            try:  # noqa: SIM105 - here and below: contextlib is a tenth of the start-up time
                os.close(fd)
            except OSError:  # the listing's own
                pass


def _kill(group: int, signum: int) -> None:
    try:  # noqa: SIM105
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # nobody, or (macOS) none but the dead, is left
        pass


def _tell(control: int, line: str) -> None:
    try:  # noqa: SIM105
        os.write(control, f"{line}\n".encode())
    except OSError:  # Gapless is gone, which `_follow` sees for itself
        pass


def _note(signum: int, frame: object) -> None:
    """Do nothing: the wake-up pipe has the signal's number already."""


if __name__ == "__main__":
    # At once, without finalising the interpreter: Gapless waits for this end.
    os._exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
