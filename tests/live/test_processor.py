"""What a machine's processor is called, and how processes know that they share it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from emulator.live import processor
from emulator.live.processor import processor_id, processor_name


def test_the_processor_is_named_with_its_cores_and_not_by_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\nprocessor\t: 1\n")
    monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    monkeypatch.setattr(platform, "node", lambda: "cora-host")
    assert processor_name() == "AMD EPYC 9654, 96 cores"
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "none")
    assert processor_name().endswith(", 1 core")
    assert "cora-host" not in processor_name()


def test_a_machine_is_known_by_its_boot_and_else_by_its_name_which_is_not_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids = []
    for boot in ("7d1c\n", "99aa\n"):
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(processor, "_BOOT_ID", tmp_path / "boot_id")
        ids.append(processor_id())
    monkeypatch.setattr(processor, "_BOOT_ID", tmp_path / "none")
    for name in ("cora-host", "cora-host", "other"):
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        ids.append(processor_id())
    assert ids[:2] == ["cpu:7d1c", "cpu:99aa"]
    assert ids[2] == ids[3] != ids[4]
    assert not any("cora" in each for each in ids)
