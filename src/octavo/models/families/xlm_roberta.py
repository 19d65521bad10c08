"""XLM-RoBERTa: RoBERTa for a hundred languages, with multilingual E5 and BGE-M3 built on it."""

from octavo.models.families.roberta import build

ARCHITECTURES = ("XLMRobertaModel",)
MODEL_TYPE = "xlm-roberta"
ENCODER = True

__all__ = ["ARCHITECTURES", "ENCODER", "MODEL_TYPE", "build"]
