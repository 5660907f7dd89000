# SPDX-License-Identifier: Apache-2.0
"""`kvlink router`: OpenAI's API in front of prefill and decode servers."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlink.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def router(
    prefill: Annotated[list[str], typer.Option(help="Base URL of a prefill server; may be repeated.")],
    decode: Annotated[list[str], typer.Option(help="Base URL of a decode server; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    recompute: Annotated[
        bool, typer.Option(help="With no prefill server up, let decode compute prompts; otherwise 503.")
    ] = True,
    streaming_from: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Prompts this long are sent to both sides at once, and decode pulls while prefill computes. Needs "
            "vLLM servers with kvlink that share a coordinator. Off when not given.",
        ),
    ] = None,
) -> None:
    """A demo, not for production: complete through a prefill and a decode server, until SIGTERM or SIGINT.

    It also is the reference for what a router and servers with kvlink say to each other. It takes servers in turn, asks
    the next one when one is gone, and refuses bodies above 256 MiB. It balances no load, bounds neither requests nor
    their time, speaks plain HTTP and asks nobody for a key. For production take vLLM's router, llm-d, NVIDIA Dynamo or
    vLLM's production stack; servers with kvlink run behind those unchanged.
    """
    import asyncio

    try:
        from kvlink.router.serving import serve
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("aiohttp"):
            raise
        raise ConfigError("the router needs aiohttp: pip install 'kvlink[router]'") from error
    from kvlink import log, tracing
    from kvlink.config import WorkerConfig

    config = WorkerConfig.from_env()
    log.setup(config.log, config.log_json)
    tracing.start()
    asyncio.run(
        serve(
            _urls(prefill),
            _urls(decode),
            host,
            port,
            recompute,
            streaming_from,
            lambda url: typer.echo(f"kvlink router on {url}"),
        )
    )


def _urls(given: list[str]) -> list[str]:
    """Without a path, each once. Raises ConfigError."""
    for url in given:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no base URL of a server; write http://host:port")
    return list(dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in given))
