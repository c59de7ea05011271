"""Files appear whole or not at all, and as the umask says."""

from __future__ import annotations

import itertools
import os
import stat
import threading

import pytest

from stratbench.cell import files


@pytest.mark.timeout(300)
def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "file"
    texts = [letter * 300_000 for letter in "ab"]
    done, seen = threading.Event(), set()

    def write() -> None:
        for i in itertools.count():
            files.write_text_atomically(path, texts[i % 2])
            if i >= 60 and len(seen) == 2:
                break
        done.set()

    files.write_text_atomically(path, texts[1])
    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        text = path.read_text()
        assert text in texts
        seen.add(text[0])
    writer.join()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_text_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        files.write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_as_the_umask_says(tmp_path):
    """mkstemp makes files private; a colleague's report must be able to read ours."""
    before = os.umask(0o027)
    try:
        files.write_text_atomically(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
