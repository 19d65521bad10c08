"""The dialect of OpenAI's API with vLLM's extra fields: routes, parameters, answers, streams and errors."""

from octavo.server.openai.routes import endpoints

__all__ = ["endpoints"]
