"""Options of `pdemu bench` that say where load is sent and how, named as those of `vllm bench serve`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from emulator.core.bench.redaction import shown_url
from emulator.core.bench.target import RouterTarget, Target, base_url, credentials, is_router
from emulator.core.errors import ConfigError, DeadlineError
from emulator.core.placement import ATTEMPT
from emulator.core.workload import LoadPlan
from emulator.lab import member as members
from emulator.live.bench import Server

HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
ROUTER_READY_S = 10.0
COMPLETIONS = "/v1/completions"
OWN_FIELDS = ("stream", "stream_options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """The server, how it is reached and how it is asked; as typed."""

    url: Annotated[
        str,
        typer.Option(
            "--url",
            metavar="URL",
            help="The server, such as http://127.0.0.1:8000, or a cluster's router, such as tcp://127.0.0.1:5555.",
        ),
    ]
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="PATH", help=f"{COMPLETIONS} (default) or /v1/chat/completions."),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model to ask for (default: the server's first).")
    ] = None
    prompt_token_ids: Annotated[
        bool,
        typer.Option("--prompt-token-ids", help="Send prompts as token ids: exact lengths, where a server takes them."),
    ] = False
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for outputs of the full length.")
    ] = True
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="KEY=VALUE", help="A header of every request; may be given several times."),
    ] = None
    extra_body: Annotated[
        str | None,
        typer.Option("--extra-body", metavar="JSON", help='Further fields of every request, such as {"top_p": 0.9}.'),
    ] = None
    request_id_prefix: Annotated[
        str | None,
        typer.Option(
            "--request-id-prefix", metavar="TEXT", help="What request ids begin with (default: bench-, and at random)."
        ),
    ] = None
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", envvar="OPENAI_API_KEY", help="Key of the server.")
    ] = None
    secret: Annotated[
        str,
        typer.Option("--secret", envvar="PDEMU_SECRET", help="Of tcp://: the cluster's secret.", show_default=False),
    ] = ""
    router_public_key: Annotated[
        str,
        typer.Option(
            "--router-public-key", envvar="PDEMU_ROUTER_PUBLIC_KEY", help="Of tcp://: see `pdemu keys`.",
            show_default=False,
        ),
    ] = ""  # fmt: skip
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="https://: check no certificate; tcp://: need no keys beyond loopback."),
    ] = False
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="A request fails that has not ended by then.")
    ] = 6 * 3600.0
    ready_check_timeout_sec: Annotated[
        float,
        typer.Option("--ready-check-timeout-sec", metavar="SECONDS", help="Wait so long for the server to be ready."),
    ] = 0.0

    def target(self, *, keep_text: bool) -> Target | RouterTarget:
        """What is asked, and how; raises ConfigError for what cannot be."""
        if not self.timeout > 0:
            raise ConfigError(f"--timeout {self.timeout:g}: must be above 0 s")
        if not self.ready_check_timeout_sec >= 0:
            raise ConfigError(f"--ready-check-timeout-sec {self.ready_check_timeout_sec:g}: must be at least 0 s")
        prefix = f"bench-{secrets.token_hex(4)}-" if self.request_id_prefix is None else self.request_id_prefix
        if not prefix.isascii() or not (prefix + "0").isprintable() or prefix.strip() != prefix:
            raise ConfigError("--request-id-prefix: must be printable ASCII, without spaces at its ends")
        return self._router(prefix) if is_router(self.url) else self._server(prefix, keep_text=keep_text)

    def _server(self, prefix: str, *, keep_text: bool) -> Target:
        endpoint = self.endpoint or COMPLETIONS
        target = Target(
            base_url=base_url(self.url, endpoint),
            endpoint=endpoint,
            api_key=self.api_key,
            credentials=credentials(self.url),
            headers=parse_headers(self.header or ()),
            extra_body=parse_extra_body(self.extra_body),
            request_id_prefix=prefix,
            verify_certificate=not self.insecure,
            timeout_s=self.timeout,
            ignore_eos=self.ignore_eos,
            token_ids=self.prompt_token_ids,
            keep_text=keep_text,
        )
        if self.prompt_token_ids and target.api == "chat":
            raise ConfigError("--prompt-token-ids: a chat takes text; leave it out, or use --endpoint /v1/completions")
        return target

    def _router(self, prefix: str) -> RouterTarget:
        for option, given in (
            ("--endpoint", self.endpoint),
            ("--prompt-token-ids", self.prompt_token_ids),
            ("--no-ignore-eos", not self.ignore_eos),
            ("--header", self.header),
            ("--extra-body", self.extra_body),
        ):
            if given:
                raise ConfigError(f"{option}: is about an HTTP server, and --url {shown_url(self.url)} is a router")
        if ATTEMPT in prefix:
            raise ConfigError(f"--request-id-prefix {prefix}: must not contain {ATTEMPT}, which routers use themselves")
        if "@" in self.url:
            raise ConfigError(f"--url {shown_url(self.url)}: a router's secret is given by PDEMU_SECRET")
        host, port = members.parse_address(self.url, "--url")
        try:
            address = members.resolve(host, self.ready_check_timeout_sec)
        except DeadlineError as error:
            raise ConfigError(f"--url {self.url}: {error}") from None
        access = members.Access(secret=self.secret, public_key=self.router_public_key, insecure=self.insecure)
        access.check(address)
        return RouterTarget(
            endpoint=f"tcp://{address}:{port}",
            secret=self.secret,
            public_key=self.router_public_key,
            insecure=self.insecure,
            request_id_prefix=prefix,
            ready_s=max(ROUTER_READY_S, self.ready_check_timeout_sec),
            timeout_s=self.timeout,
        )


def driver(target: Target | RouterTarget, plan: LoadPlan, seed: int) -> Server:
    """Whatever speaks to the target, for this plan; create it on the running event loop."""
    if isinstance(target, RouterTarget):
        from emulator.live.router_client import RouterClient  # noqa: PLC0415 - only what this run needs

        return RouterClient(target, scheduled=not plan.at_once)
    from emulator.live.http_client import OpenAiClient  # noqa: PLC0415 - slow to import, and needed by this command alone

    return OpenAiClient(target, seed)


def parse_headers(given: Sequence[str]) -> dict[str, str]:
    """Headers of `KEY=VALUE`s. What is wrong is told without the value, which may be a key."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not HEADER.fullmatch(name):
            raise ConfigError("--header: must be KEY=VALUE, such as X-Tenant=blue")
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"--header {name}: the value must be printable ASCII")
        if name.lower() in {known.lower() for known in found}:
            raise ConfigError(f"--header {name}: is given twice")
        found[name] = value
    return found


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """The fields of a JSON object."""
    if text is None:
        return {}
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f'--extra-body: must be a JSON object, such as {{"top_p": 0.9}} ({error})') from None
    for field in OWN_FIELDS:
        if field in found:
            raise ConfigError(f"--extra-body: {field} cannot be changed, since streams with usage are what is measured")
    return found
