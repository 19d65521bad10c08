"""The dialect of Text Generation Inference: its routes, parameters, answers and errors on octavo's engine."""

from octavo.server.tgi.routes import endpoints

__all__ = ["endpoints"]
