"""A served policy: the application, its key, and how it starts and ends."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_post.serving.formats import error_json
from jaxrl_post.serving.metrics import ServerMetrics
from jaxrl_post.serving.openai_api import Api, Served
from jaxrl_post.serving.scheduler import Scheduler


class KeyCheck:
    """Refuses requests under /v1 without the key."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                response = JSONResponse(error_json("wrong or missing API key", 401, code="invalid_api_key"), 401)
                return await response(scope, receive, send)
        await self._app(scope, receive, send)


def application(served: Served, scheduler: Scheduler, key: str | None) -> Starlette:
    """Starts the scheduler with itself, and at its end lets it finish what it holds."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        scheduler.start()
        yield
        scheduler.stop()

    routes = Api(served, scheduler, ServerMetrics(scheduler)).routes()
    return Starlette(routes=routes, lifespan=lifespan, middleware=[Middleware(KeyCheck, key=key)] if key else [])


def listen(host: str, port: int) -> socket.socket:
    """Raises: ValueError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OverflowError as error:
        raise ValueError(f"cannot listen on --port {port}: ports go from 0 (any that is free) to 65535") from error
    except OSError as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from error


def run(app: Starlette, sock: socket.socket, started: Callable[[uvicorn.Server], None] = lambda server: None) -> None:
    """Serve until a signal asks for the end; requests under way are answered first."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="on")
    server = uvicorn.Server(config)
    started(server)
    server.run(sockets=[sock])
