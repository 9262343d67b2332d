"""What a process tells its launcher: one JSON line each on standard output. And what it is told to be."""

from __future__ import annotations

from typing import Literal

import msgspec

from emulator.core.listen import Listen
from emulator.core.record_limits import RecordLimits
from emulator.core.run_spec import RunSpec


class HttpService(Listen, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a client's process serves HTTP, and the key that its clients must show, if any."""

    api_key: str = ""


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who a process is: the first line on its standard input. The client writes the run's report to the file `report`.

    A client without `http` sends the run's load; with it, it serves others' requests, and listens before it moves.
    With `netns` it moves there first; with `kernel_shaping` its NIC is shaped at the interface of `kv_address`.
    A router or node with `metrics` serves its own there. A router with `record` ends the record at these limits.

    A router listens on `control_address`, a node takes KV in on `kv_address`; addresses beyond loopback need
    the router's keys, or to be `insecure` on purpose. A node may keep up to `host_memory_bytes` of KV that it received
    or, on its CPU, computed, and is expected to keep about `expected_kv_bytes`.
    """

    kind: Literal["router", "node", "client"]
    name: str
    run: RunSpec
    secret: str
    report: str = ""
    router_endpoint: str = ""
    router_public_key: str = ""
    router_secret_key: str = ""
    insecure: bool = False
    control_address: str = "127.0.0.1"
    kv_address: str = "127.0.0.1"
    netns: str = ""
    kernel_shaping: bool = False
    host_memory_bytes: int = 0
    expected_kv_bytes: int = 0
    join_timeout_s: float = 20.0
    http: HttpService | None = None
    metrics: Listen | None = None
    record: RecordLimits | None = None


class Ready(msgspec.Struct, frozen=True, tag_field="status", tag="ready"):
    """The process is part of the cluster; a router, an endpoint and a node that takes KV in say where
    they listen, and whoever serves metrics their URL."""

    endpoint: str = ""
    metrics: str = ""


class Waiting(msgspec.Struct, frozen=True, tag_field="status", tag="waiting"):
    """The process is not ready yet; `what` says in a sentence who it is and what it waits for."""

    what: str


class Underway(msgspec.Struct, frozen=True, tag_field="status", tag="underway"):
    """A client's progress: model seconds, requests sent and ended."""

    now_s: float
    sent: int
    ended: int


class RecordEnded(msgspec.Struct, frozen=True, tag_field="status", tag="record_ended"):
    """A cluster has recorded `requests` and records no more, since there was more than `limit`; it serves on."""

    requests: int
    limit: str


class Lost(msgspec.Struct, frozen=True, tag_field="status", tag="lost"):
    """An endpoint has heard that the router lost the node `name`, or has it `back`."""

    name: str
    back: bool = False


class Done(msgspec.Struct, frozen=True, tag_field="status", tag="done"):
    """The process has done its part; a client's report is written."""


class Failed(msgspec.Struct, frozen=True, tag_field="status", tag="failed"):
    """The process cannot go on; `error` names the class of the error."""

    error: str
    message: str


Interim = Waiting | Underway
"""What is told between the start and the end."""

Status = Ready | Interim | RecordEnded | Lost | Done | Failed
