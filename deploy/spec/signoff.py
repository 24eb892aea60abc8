"""The block of deploy.toml that signs off what `deploy tune` found, and whether the rest still says that. Pure."""

import tomlkit

from deploy.spec.model import Spec, Tuned

COMMENT = "# What `deploy tune` found and who signed it off. The next one writes it anew; without it nothing changes.\n"


def block(tuned: Tuned) -> str:
    """The table `tuned`."""
    return f"{COMMENT}{tomlkit.dumps({'tuned': tuned.model_dump(mode='json')})}"


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
