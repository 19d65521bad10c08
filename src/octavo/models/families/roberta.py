"""RoBERTa: BERT whose positions begin behind the padding token's."""

from octavo.models.config import ConfigReader
from octavo.models.encoder import build_encoder
from octavo.models.graph import Graph

ARCHITECTURES = ("RobertaModel",)
ENCODER = True


def build(config: ConfigReader) -> Graph:
    """The graph."""
    return build_encoder(config, first_position=config.integer("pad_token_id", 1, least=0) + 1)
