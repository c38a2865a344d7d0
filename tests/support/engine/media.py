"""Private names of the readers of media."""

from __future__ import annotations

from typing import Any

import pytest

from vlmfast.media import decoders


def decoded_groups(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Key frames from which videos are decoded from now on; None for the beginning."""
    found, decode = [], decoders.AvReader._decode_from

    def spy(reader: decoders.AvReader, key: int | None) -> Any:
        found.append(key)
        return decode(reader, key)

    monkeypatch.setattr(decoders.AvReader, "_decode_from", spy)
    return found


def believe_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of frames are not compared with the limit before they are decoded."""
    monkeypatch.setattr(decoders.AvReader, "_check_size", lambda *size: None)


def fail_while_decoding(
    monkeypatch: pytest.MonkeyPatch, convert: Exception, demux: Exception | None = None
) -> None:
    """The conversion of a frame raises ``convert``, or the demuxer ``demux``."""

    class Broken(decoders.AvReader):
        def _packets(self) -> Any:
            if demux is not None:
                raise demux
            return super()._packets()

        def _image(self, frame: Any) -> Any:
            raise convert

    monkeypatch.setattr(decoders, "AvReader", Broken)
