"""The bulk path for KV bytes between nodes, apart from the control messages.

Each node has one `KvSender` and one `KvReceiver`, the two directions of its emulated network card, each with
its own ZeroMQ sockets and its own thread, so that bulk never delays a control message and the event loop
never touches a frame. All times are seconds of `time.monotonic()`; rates and sizes are those of the wire,
already scaled by the caller.
"""

from __future__ import annotations

from emulator.live.kv_frames import Arrival, KvReceiverStats, KvSenderStats, Part
from emulator.live.kv_receiver import KvReceiver
from emulator.live.kv_sender import KvSender

__all__ = ["Arrival", "KvReceiver", "KvReceiverStats", "KvSender", "KvSenderStats", "Part"]
