"""BERT and sentence encoders built on it: MiniLM, BGE, E5, GTE."""

from octavo.models.config import ConfigReader
from octavo.models.encoder import build_encoder
from octavo.models.graph import Graph

ARCHITECTURES = ("BertModel",)
ENCODER = True


def build(config: ConfigReader) -> Graph:
    """The graph, up to the vectors of the tokens; the pooler that the files hold is for classifiers."""
    return build_encoder(config)
