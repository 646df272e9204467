"""Reference click models, one paper a file: DLRM, DCN-V2, Wukong."""

from loka.recsys.models.base import RecModel, TowerConfig
from loka.recsys.models.registry import MODEL_NAMES, PRESET_NAMES, build_model, model_config

__all__ = ["MODEL_NAMES", "PRESET_NAMES", "RecModel", "TowerConfig", "build_model", "model_config"]
