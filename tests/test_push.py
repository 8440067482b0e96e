"""`hotlap export --push-to-hub`, against a local server that takes uploads as the hub does."""

from __future__ import annotations

import huggingface_hub.constants
import pytest

from tests.command import complaint
from tests.hub_uploads import TOKEN, taking_uploads
from tests.trained_run import in_process, trained_run

# huggingface_hub's own, of the library that it speaks HTTP with.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with taking_uploads() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def export(capsys, *words: str):
    return in_process(capsys, "export", str(trained_run()), *words, "--device", "cpu")


def test_every_file_of_the_export_arrives(capsys, hub, tmp_path):
    target = tmp_path / "model"
    result = export(capsys, str(target), "--push-to-hub", "someone/small", "--private")
    assert result.returncode == 0, result.stderr
    assert f"uploaded to {hub.endpoint}/someone/small" in result.stdout
    assert hub.visibility == {"someone/small": "private"}
    written = {path.name: path.read_bytes() for path in target.iterdir()}
    assert len(written) == 4
    assert hub.repositories["someone/small"] == written


def test_a_second_upload_goes_on_top_of_the_first(capsys, hub, tmp_path):
    for name in ("first", "second"):
        result = export(capsys, str(tmp_path / name), "--push-to-hub", "someone/small")
        assert result.returncode == 0, result.stderr
    assert hub.visibility == {"someone/small": None}
    assert hub.commits >= 1


def test_a_refused_upload_is_one_line_and_the_export_stays(capsys, hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    target = tmp_path / "model"
    line = complaint(export(capsys, str(target), "--push-to-hub", "someone/small"))
    assert "to upload someone/small" in line
    assert f"hf upload someone/small {target}" in line
    assert (target / "model.safetensors").exists()
    assert hub.repositories == {}


@pytest.mark.parametrize("name", ["small", "a/b/c", "someone/has blanks", "someone/..", ""])
def test_a_name_that_cannot_be_is_refused_before_anything_is_written(capsys, tmp_path, name):
    assert "USER/MODEL" in complaint(export(capsys, str(tmp_path / "model"), "--push-to-hub", name))
    assert list(tmp_path.iterdir()) == []


def test_private_alone_is_refused(capsys, tmp_path):
    assert "--push-to-hub" in complaint(export(capsys, str(tmp_path / "model"), "--private"))
