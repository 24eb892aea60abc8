"""The error of everything that looks at the host."""

from deploy.errors import DeployError


class HostError(DeployError):
    """This machine cannot run the stack as it is; nothing was started."""

    exit_code = 3
