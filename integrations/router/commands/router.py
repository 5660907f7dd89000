# SPDX-License-Identifier: Apache-2.0
"""`kvlink router` serves OpenAI's API in front of prefill and decode servers."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlink.cli.checks import ReadyJson, print_ready
from kvlink.cli.examples import examples_of
from kvlink.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command(epilog=examples_of("router"))
def router(
    prefill: Annotated[
        list[str], typer.Option(help="Send prompts to the prefill server at this base URL. May be repeated.")
    ],
    decode: Annotated[
        list[str], typer.Option(help="Send handoffs to the decode server at this base URL. May be repeated.")
    ],
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Listen on this port. 0 takes any free port.")
    ] = 8000,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Let decode compute prompts while no prefill server is up. Otherwise the router answers HTTP 503."
        ),
    ] = True,
    streaming_from: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Send prompts of at least this many tokens to both servers at "
            "once, so that decode pulls while prefill "
            "computes. This needs vLLM servers with kvlink that share a coordinator. It is off by default.",
        ),
    ] = None,
    bidirectional: Annotated[
        bool,
        typer.Option(
            help="Send prefill the ticket of the chat's last answer with the next turn, so that it pulls that answer. "
            "This needs vLLM servers with kvlink's option of that name. It is off by default."
        ),
    ] = False,
    migrate: Annotated[
        bool,
        typer.Option(
            help="Continue a streamed answer at another decode server if its server is drained or breaks off. This "
            "needs vLLM servers with kvlink, all with kv_role kv_both. It is off by default."
        ),
    ] = False,
    as_json: ReadyJson = False,
) -> None:
    """Serve OpenAI's API in front of prefill and decode servers until SIGTERM or SIGINT. This is a demo, not for
    production.

    It is also the reference for the messages between a router and servers with kvlink. Servers take turns. If one is
    gone, the router asks the next one. It refuses bodies above 64 MiB. It does not balance load, limits neither the
    number of requests nor their time, speaks plain HTTP and checks no API key.

    For production, use vLLM's router, llm-d, NVIDIA Dynamo or vLLM's production stack. Servers with kvlink run behind
    those unchanged.
    """
    import asyncio

    try:
        from ..answering import Options
        from ..serving import serve
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("aiohttp"):
            raise
        raise ConfigError("the router needs aiohttp: pip install 'kvlink[router]'") from error
    from kvlink import tracing
    from kvlink.cli.checks import base_urls, can_listen
    from kvlink.config import WorkerConfig
    from kvlink.runtime import log

    urls = base_urls(prefill, "--prefill"), base_urls(decode, "--decode")
    host = can_listen(host, port, "--host", "--port")
    config = WorkerConfig.from_env()
    log.setup(config.log, config.log_json)
    tracing.start()
    asyncio.run(
        serve(
            *urls,
            host,
            port,
            Options(recompute, streaming_from, bidirectional, migrate),
            lambda url: print_ready(as_json, f"kvlink router on {url}", router=url),
        )
    )
