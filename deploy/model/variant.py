"""Is the folder's model the one that deploy.toml describes? Decided from the configuration files alone."""

import json
from pathlib import Path
from typing import Any, cast

from deploy.host.errors import HostError
from deploy.spec.model import Spec, Variant

DSPARK_FOLDER = "dspark"
DSPARK_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
"""Keys of a checkpoint that brings its draft model along (SGLang 0.5.23, `checkpoint_bundles_dspark_draft`)."""


def require_variant(folder: Path, spec: Spec, draft: Path | None) -> None:
    """Check the experts' format and the draft that the speculation needs.

    Args:
        folder: the model, complete.
        draft: folder of a draft model of its own, None if there should be one in `folder`.

    Raises:
        HostError: the files are of another kind.
    """
    config = _config(folder)
    found = variant_of(config)
    if found != spec.model.variant:
        raise HostError(
            f'{folder} is an {found} checkpoint, deploy.toml says variant = "{spec.model.variant}"',
            "the experts of each run on kernels of their own",
            f'set variant = "{found}" under [model], or correct path',
        )
    if spec.engine.speculation == "eagle" and not config.get("num_nextn_predict_layers"):
        raise HostError(
            f"{folder} has no MTP layer",
            'speculation = "eagle" guesses with it (num_nextn_predict_layers in config.json)',
            'set engine.speculation = "none", or serve a checkpoint that kept it',
        )
    if spec.engine.speculation == "dspark":
        _require_draft(folder, config, draft)


def variant_of(config: dict[str, Any]) -> Variant:
    """The format of the experts, from the text that SGLang 0.5.23 looks for (`ModelConfig.nvfp4_moe_meta`)."""
    quantization = config.get("quantization_config")
    values = cast("dict[str, Any]", quantization) if isinstance(quantization, dict) else {}
    return "nvfp4" if str(values.get("moe_quant_algo", "")).upper() == "NVFP4" else "mxfp4"


def _require_draft(folder: Path, config: dict[str, Any], draft: Path | None) -> None:
    if draft is not None:
        if not (draft / "config.json").is_file():
            raise HostError(f"{draft} is no draft model", "it has no config.json", "correct draft_path under [engine]")
    elif not any(key in config for key in DSPARK_KEYS) and not (folder / DSPARK_FOLDER / "config.json").is_file():
        raise HostError(
            f"{folder} has no DSpark draft model",
            f"neither config.json nor a folder {DSPARK_FOLDER}/ in it describes one",
            'set draft_path under [engine], or engine.speculation = "eagle"',
        )


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: Any = json.loads((folder / "config.json").read_text())
    except ValueError:
        config = None
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}
