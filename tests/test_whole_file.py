"""Small files are whole or not there."""

import errno
import os
import subprocess
import sys

import pytest

from recapp.settings.whole_file import write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("old")
    write_whole(file, "a\r\nb\n")
    assert file.read_bytes() == b"a\r\nb\n"
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_on_a_full_disk_the_old_file_stays_and_the_error_names_it(tmp_path, monkeypatch):
    file = tmp_path / "plan.yaml"
    file.write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(file, "new")
    assert caught.value.filename == str(file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_link_still_leads_to_its_file(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("old")
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    write_whole(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"


def test_standard_output_is_written_and_not_replaced():
    program = "from recapp.settings.whole_file import write_whole; write_whole('/dev/stdout', 'a')"
    assert subprocess.check_output([sys.executable, "-c", program]) == b"a"
