"""Runs the server: loads the engine, serves HTTP with uvicorn, and ends in order when it is told to."""

from __future__ import annotations

import uvicorn

from octavo import __version__
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.loading import load_engine
from octavo.server.app import build_app
from octavo.server.options import ServerOptions
from octavo.server.serving import Serving

__all__ = ["make_serving", "serve", "uvicorn_config"]


def make_serving(options: ServerOptions, llm: AsyncLLM | None = None) -> Serving:
    """Load the engine (unless one is given) and put together what the handlers share."""
    if llm is None:
        llm = AsyncLLM.from_loaded(load_engine(options.engine))
    names = list(options.served_model_name) or [options.engine.model]
    return Serving(llm=llm, options=options, model_names=names, version=__version__)


def uvicorn_config(serving: Serving) -> uvicorn.Config:
    """How uvicorn is to run the application of ``serving``."""
    options = serving.options
    return uvicorn.Config(
        build_app(serving),
        host=options.host,
        port=options.port,
        uds=options.uds,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(options.idle_timeout),
    )


def serve(options: ServerOptions) -> int:
    """Serve until a signal ends it; gives the exit code of the process."""
    serving = make_serving(options)
    try:
        uvicorn.Server(uvicorn_config(serving)).run()
    finally:
        serving.llm.shutdown()
    return 0
