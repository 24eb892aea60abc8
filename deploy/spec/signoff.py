"""Does deploy.toml still say what `deploy tune` signed off in it? Pure."""

from deploy.spec.model import Spec


def word(value: object) -> str:
    """A value of deploy.toml in one word, empty for one that is not set."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def stale(spec: Spec) -> list[str]:
    """The winners whose key says something else by now, in words."""
    return [
        f"{winner.setting} is {word(spec.at(winner.setting)) or 'not set'}, and {winner.now} was signed off"
        for winner in (spec.tuned.winner if spec.tuned else ())
        if word(spec.at(winner.setting)) != winner.now
    ]
