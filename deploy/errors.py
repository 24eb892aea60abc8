"""The error every part of the controller raises for what a person can mend."""

from typing import ClassVar


class DeployError(Exception):
    """A failure with its cause and its cure, for the command line to show without a traceback.

    Args:
        message: what happened, one line.
        why: the cause, as far as it is known.
        fix: what to do about it, preferably the exact command.

    Attributes:
        aftermath: in what state the failure has left the stack, if it was being changed.
        exit_code: of the command line; `deploy --help` says what each means.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, why: str, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.fix = fix
        self.aftermath = ""

    def __str__(self) -> str:
        return f"{self.message}\n  why: {self.why}\n  fix: {self.fix}"


class WrongInput(DeployError):
    """What the command line or deploy.toml names cannot be used, or the verb needs a setting that is not set."""

    exit_code = 2
