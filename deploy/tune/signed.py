"""The sign-off: winners written into deploy.toml with their evidence. Pure."""

from collections.abc import Mapping, Sequence

import tomlkit

from deploy.spec.model import Tuned, Winner
from deploy.spec.signoff import COMMENT, block, word
from deploy.tune.experiment import Edits, Finding
from deploy.tune.switches import apply


def winners(findings: Sequence[Finding], before: Mapping[str, object]) -> tuple[Winner, ...]:
    """The settings that won; of one key the last.

    Args:
        before: each key's value until now.
    """
    found: dict[str, Winner] = {}
    for finding in findings:
        if finding.verdict != "better":
            continue
        key, value = next(iter(finding.comparison.edits.items()))
        judged = finding.judgement
        found[key] = Winner(
            setting=key,
            was=word(before.get(key)),
            now=word(value),
            ratio=round(judged.ratio, 4),
            at_least=round(judged.low or 1.0, 4),
            pairs=judged.pairs,
            answers=round(1.0 if finding.agreement is None else finding.agreement, 4),
        )
    return tuple(found.values())


def signed(text: str, edits: Edits, tuned: Tuned) -> str:
    """deploy.toml with the winners' values and the block that signs them off; all else stays as it is."""
    document = tomlkit.parse(apply(text, edits))
    if "tuned" in document:
        del document["tuned"]
    kept = tomlkit.dumps(document).replace(COMMENT, "").rstrip("\n")
    return f"{kept}\n\n{block(tuned)}"
