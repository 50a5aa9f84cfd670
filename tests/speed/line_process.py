"""A process that answers each line on its standard input with a line on its standard output.

    process = LineProcess("TorchRec", [python, worker], folder / "stderr.txt")
    process.send('{"steps": 12}')       returns at once, so that other processes can work too
    process.answer()                    waits for the answer, a line without its end
    process.close()                     closes the standard input, which ends the process

The process uses no core while it waits for a line, so it does not disturb other contenders.
"""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from recapp.errors import LaunchError

SECONDS_TO_END = 5


class LineProcess:
    """A process that reads requests and writes answers line by line.

    Args:
        name: The name of the process in errors.
        command: The command line.
        errors: The file that gets its standard error.
        environment: Its environment variables; None gives it those of this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        errors: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._errors = errors
        with errors.open("w") as file:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
            )
        assert process.stdin is not None and process.stdout is not None
        self._input = process.stdin
        self._output = process.stdout
        self.pid = process.pid

    def send(self, line: str) -> None:
        """Send a line. If the process has ended, only `answer` reports that.

        Args:
            line: The line without its end.
        """
        with suppress(OSError):
            self._input.write(line + "\n")
            self._input.flush()

    def answer(self) -> str:
        """Wait for a line, and return it.

        Raises:
            LaunchError: The process has ended without an answer.
        """
        line = self._output.readline()
        if not line:
            self._process.wait()
            said = [s for s in self._errors.read_text(errors="replace").splitlines() if s.strip()]
            last = said[-1].strip() if said else "nothing on its standard error"
            raise LaunchError(f"{self.name} ended without an answer: {last}")
        return line.rstrip("\n")

    def terminate(self) -> None:
        """Send SIGTERM to the process; `close` then waits for its end."""
        self._process.terminate()

    def end_input(self) -> None:
        """Close the standard input of the process, so that the process ends."""
        with suppress(OSError):
            self._input.close()

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """End the process by closing its standard input; kill it if that does not end it.

        Args:
            seconds: The time to wait for its end.
        """
        self.end_input()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
