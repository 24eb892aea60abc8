"""Is the folder's model the one that deploy.toml describes?"""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.host.errors import HostError
from deploy.model.variant import require_variant
from deploy.spec.model import Engine, Model, Role, Spec

MXFP4: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}
NVFP4: dict[str, Any] = {
    "quantization_config": {"quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"},
}


def folder(tmp_path: Path, config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def spec(**changes: Any) -> Spec:
    engine, model = Engine.model_validate(changes.get("engine", {})), Model.model_validate(changes.get("model", {}))
    return Spec(profile="replicas", replica=(Role(gpus=(0, 1), numa_node=0),), engine=engine, model=model)


def test_a_checkpoint_of_the_other_format_is_refused_with_the_right_word(tmp_path: Path) -> None:
    require_variant(folder(tmp_path, MXFP4), spec(), None)
    require_variant(folder(tmp_path, NVFP4), spec(model={"variant": "nvfp4"}), None)
    with pytest.raises(HostError) as caught:
        require_variant(folder(tmp_path, NVFP4), spec(), None)
    assert 'variant = "nvfp4"' in caught.value.fix
    with pytest.raises(HostError):
        require_variant(folder(tmp_path, MXFP4), spec(model={"variant": "nvfp4"}), None)


def test_eagle_needs_the_models_own_mtp_layer(tmp_path: Path) -> None:
    wanted = spec(engine={"speculation": "eagle"})
    require_variant(folder(tmp_path, MXFP4), wanted, None)
    with pytest.raises(HostError, match="no MTP layer"):
        require_variant(folder(tmp_path, {**MXFP4, "num_nextn_predict_layers": 0}), wanted, None)


def test_dspark_finds_its_draft_in_the_configuration_in_a_folder_or_where_it_is_said_to_be(tmp_path: Path) -> None:
    wanted = spec(engine={"speculation": "dspark"})
    model = folder(tmp_path, MXFP4)
    with pytest.raises(HostError, match="no DSpark draft"):
        require_variant(model, wanted, None)
    draft = tmp_path / "elsewhere"
    with pytest.raises(HostError, match="no draft model"):
        require_variant(model, wanted, draft)
    draft.mkdir()
    folder(draft, {})
    require_variant(model, wanted, draft)
    require_variant(folder(tmp_path, {**MXFP4, "dspark_block_size": 5}), wanted, None)
    folder(tmp_path, MXFP4)
    (tmp_path / "dspark").mkdir()
    folder(tmp_path / "dspark", {})
    require_variant(model, wanted, None)


@pytest.mark.parametrize("config", [[], {"quantization_config": "x"}, None])
def test_an_odd_configuration_is_no_traceback(tmp_path: Path, config: object) -> None:
    require_variant(folder(tmp_path, config), spec(), None)
