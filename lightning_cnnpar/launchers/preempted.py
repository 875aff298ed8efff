"""The end of a run that asks to be started again."""

import os

EXIT_CODE = os.EX_TEMPFAIL
"""75: a failure that another try may not meet."""


class Preempted(SystemExit):
    """Ends the process with exit code 75: its checkpoint is written, and the run should be started again.

    Args:
        reason: For the log.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_CODE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
