"""Files from anywhere: whatever is in them, the answer is a ValueError naming the file, soon and in little memory."""

import json
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models.test_gguf import tensors, write
from safetensors.numpy import save

from jaxrl_post import recipes
from jaxrl_post.config import JsonlTask
from jaxrl_post.data.chat_template import compile_template
from jaxrl_post.data.jsonl import read_rows
from jaxrl_post.data.tokenizer import ByteTokenizer, FolderTokenizer
from jaxrl_post.models.gguf_convert import convert
from jaxrl_post.models.gguf_header import check_header
from jaxrl_post.models.shards import INDEX, open_tensors
from launch.byte_tokenizer import write_byte_tokenizer

CHECK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
TRIES = 60
MEMORY = 64 << 20  # bytes that Python may take for a small file
few = settings(max_examples=TRIES, deadline=None, suppress_health_check=CHECK, derandomize=True, database=None)

wild = st.sampled_from([0, 1, 2, 7, 8, 9, 255, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1])
edits = st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from([1, 4, 8]), wild), min_size=1, max_size=4)


def edited(data, changes, length):
    """`data` with numbers written over it at some places, cut to a length."""
    data = bytearray(data)
    for at, width, number in changes:
        at %= max(1, len(data) - width)
        data[at : at + width] = (number % 256**width).to_bytes(width, "little")
    return bytes(data[: max(0, len(data) - length)])


@pytest.fixture
def harmless():
    """Runs something that may raise ValueError and nothing else, in bounded time and memory."""

    def check(work, *parts):
        tracemalloc.start()
        start = time.process_time()
        said = None
        try:
            work()
        except ValueError as error:
            said = str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert said is None or [part for part in parts if part not in said] == [], said
        assert time.process_time() - start < 5
        assert peak < MEMORY

    return check


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, tensors())
    return path


@few
@given(edits, st.sampled_from([0, 0, 0, 1, 100, 5000]), st.booleans())
def test_gguf_files(tmp_path, small_gguf, harmless, changes, length, at_start):
    changes = [(at % 1500 if at_start else at, width, number) for at, width, number in changes]
    path = tmp_path / "m.gguf"
    path.write_bytes(edited(small_gguf.read_bytes(), changes, length))
    target = tmp_path / "out"
    target.mkdir(exist_ok=True)
    harmless(lambda: convert(path, target), str(path))


def gguf_bytes(fields=(), infos=(), counts=None, data=b"\0" * 256):
    """A file of the given metadata (key, type, value bytes) and tensors (name, shape, type, offset)."""
    text = lambda name: struct.pack("<Q", len(name)) + name.encode()
    out = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(infos), len(fields))))
    out += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in fields)
    for name, shape, kind, offset in infos:
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return out.ljust(-(-len(out) // 32) * 32, b"\0") + data


ONE = ("a", (8, 4), 0, 0)  # 128 bytes of float32


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (gguf_bytes(counts=(2**63, 0)), "9223372036854775808 tensors, more than the 65536"),
        (gguf_bytes(counts=(0, 2**40)), "1099511627776 metadata fields"),
        (gguf_bytes([("k", 8, struct.pack("<Q", 2**62))]), "takes 4611686018427387904 bytes"),
        (gguf_bytes([("k", 9, struct.pack("<IQ", 0, 2**64 - 1))]), "18446744073709551615 array elements"),
        (gguf_bytes([("k", 9, struct.pack("<IQ", 12, 2**20))]), "array of 'k'"),
        (gguf_bytes([("k", 9, struct.pack("<IQ", 9, 1))]), "array of type 9"),
        (gguf_bytes([("k", 4, b"abcd"), ("k", 4, b"abcd")]), "'k' comes twice"),
        (gguf_bytes([("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment=0"),
        (gguf_bytes(infos=[("a", (2**32, 2**32), 0, 0)]), "ends at byte 73786976294838206464"),
        (gguf_bytes(infos=[("a", (2**63, 2, 2), 0, 0)]), "ends at byte"),
        (gguf_bytes(infos=[("a", (0, 4), 0, 0)]), "cannot be cut into blocks"),
        (gguf_bytes(infos=[("a", (33,), 8, 0)]), "cannot be cut into blocks of 32"),
        (gguf_bytes(infos=[("a", (1,) * 9, 0, 0)]), "9 dimensions"),
        (gguf_bytes(infos=[("a", (4,), 999, 0)]), "unknown type 999"),
        (gguf_bytes(infos=[("a", (4,), 0, 2**64 - 32)]), "ends at byte"),
        (gguf_bytes(infos=[("a", (4,), 0, 8)]), "no multiple of the alignment"),
        (gguf_bytes(infos=[ONE, ONE]), "'a' comes twice"),
        (gguf_bytes(infos=[ONE, ("b", (8, 4), 0, 96)]), "'a' and 'b' overlap"),
        (b"", "no GGUF magic"),
        (b"GGUF\0\0\0\3", "version"),
    ],
)
def test_a_gguf_header_that_lies(tmp_path, harmless, content, why):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        check_header(path, gguf.GGML_QUANT_SIZES)
    harmless(lambda: convert(path, tmp_path), str(path), "not a complete GGUF file")


SMALL_SAFETENSORS = save({"a": np.zeros((4, 4), np.float32), "b": np.ones(3, np.float16)})


def safetensors_bytes(header, data=b"\0" * 64, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


ENTRY = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


def read_all(folder):
    return [tensor[tuple(slice(None) for _ in tensor.get_shape())] for tensor in open_tensors(folder).values()]


@few
@given(edits, st.sampled_from([0, 0, 1, 40]))
def test_safetensors_files(tmp_path, harmless, changes, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(edited(SMALL_SAFETENSORS, changes, length))
    harmless(lambda: read_all(tmp_path), str(path))


@pytest.mark.parametrize(
    "content",
    [
        safetensors_bytes({"a": ENTRY}, size=2**63),
        safetensors_bytes({"a": ENTRY}, size=10**9),
        safetensors_bytes({"a": ENTRY | {"data_offsets": [0, 2**64]}}),
        safetensors_bytes({"a": ENTRY | {"shape": [2**32, 2**32]}}),
        safetensors_bytes({"a": ENTRY | {"shape": [2**62, 4]}}),
        safetensors_bytes({"a": ENTRY | {"data_offsets": [64, 0]}}),
        safetensors_bytes({"a": ENTRY, "b": ENTRY}),
        safetensors_bytes({"a": ENTRY | {"dtype": "OBJECT"}}),
        safetensors_bytes(b"[" * 100_000),
        safetensors_bytes(b'{"a":' * 50_000),
        b"",
    ],
)
def test_a_safetensors_header_that_lies(tmp_path, harmless, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        open_tensors(tmp_path)
    harmless(lambda: read_all(tmp_path), str(tmp_path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@few
@given(json_values)
@example({"weight_map": {"a": ["x"]}})
@example({"weight_map": {"a": ""}})
@example({"weight_map": {"a": "\ud800.safetensors"}})
@example({"weight_map": {"a": "x" * 5000 + ".safetensors"}})
def test_indexes_of_shards(tmp_path, harmless, value):
    (tmp_path / INDEX).write_text(json.dumps(value))
    harmless(lambda: open_tensors(tmp_path), str(tmp_path))


@few
@given(st.lists(st.binary(max_size=30) | json_values.map(lambda value: json.dumps({"prompt": value}).encode())))
@example([b'{"prompt": "\\ud800"}'])
@example([b'{"prompt": ' + b"[" * 100_000])
@example([b'{"prompt": ' + b"1" * 10_000 + b"}"])
@example([b"\xef\xbb\xbf" * 3])
def test_lines_of_json(tmp_path, harmless, lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    for on_bad_row in ("error", "skip"):
        harmless(lambda: read_rows(path, JsonlTask(kind="jsonl", path=str(path), on_bad_row=on_bad_row)), str(path))  # noqa: B023


def test_a_file_without_line_feeds_is_not_read_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: longer than 67108864 bytes"):
        read_rows(path, JsonlTask(kind="jsonl", path=str(path)))


RECIPE = (Path(__file__).parent.parent / "configs/tiny/grpo.yaml").read_text()
marks = st.sampled_from(
    ["&a", "*a", "!!python/object/apply:os.system [x]", "${x}", "${run_dir}", "{", "[", "- ", ": ", "\t", "\0",
     "\ud7ff", "1e999", "0x", "<<: ", "? ", "|", "'", '"', "9" * 5000, "[" * 3000]
)  # fmt: skip


@few
@given(st.lists(st.tuples(st.integers(0, len(RECIPE)), marks), min_size=1, max_size=3), st.integers(0, len(RECIPE)))
def test_recipes(tmp_path, harmless, insertions, start):
    text = RECIPE
    for at, mark in insertions:
        text = text[:at] + mark + text[at:]
    path = tmp_path / "recipe.yaml"
    path.write_text(text[start if start % 3 == 0 else 0 :], encoding="utf-8")
    harmless(lambda: recipes.load(path), str(path))


@few
@given(st.lists(st.tuples(st.sampled_from(["steps", "model.path", "optimizer", "reward.kind", "data.task"]), marks)))
def test_overrides(harmless, pairs):
    path = Path(__file__).parent.parent / "configs/tiny/grpo.yaml"
    harmless(lambda: recipes.load(path, [f"{key}={value}" for key, value in pairs]))


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


@few
@given(st.sampled_from(TOKENIZER_FILES), st.data())
def test_files_of_tokenizers(tmp_path, byte_folder, harmless, name, data):
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    for file in byte_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    keys = [*content, "eos_token", "eos_token_id", "chat_template"]
    content[data.draw(st.sampled_from(keys))] = data.draw(json_values)
    (folder / name).write_text(json.dumps(content))

    def use():
        tokenizer = FolderTokenizer(folder)
        tokenizer.decode(tokenizer.encode("12 ü"))

    harmless(use, str(folder))


pieces = st.sampled_from(
    ["{{", "}}", "{%", "%}", "{#", "(", ")", "[", "]", "|", ".", "~", "'a'", "messages", "for m in messages", "endfor",
     "set x = 1", "if", "endif", "macro f()", "endmacro", "f()", "__class__", "loop", "namespace()", "10**9", "*", " "]
)  # fmt: skip


@few
@given(st.lists(pieces, max_size=12).map("".join))
def test_texts_of_chat_templates(harmless, source):
    harmless(lambda: compile_template(source, "x.jinja")([{"role": "user", "content": "a"}]), "x.jinja")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 'a' * 10**10 }}", "takes more than 1024 MiB"),
        ("{{ 'a'|center(10**10) }}", "takes more than 1024 MiB"),
        ("{{ (1).to_bytes(10**10) }}", "takes more than 1024 MiB"),
        ("{{ '\t'.expandtabs(2**31 - 1) }}", "takes more than 1024 MiB"),
        ("{{ 'a' * 30000000 }}", "makes 30000000 characters"),
        ("{{ (10**9)**(10**8) }}", "not ended after 2 s"),
        ("{{ messages.__class__ }}", "leave its sandbox"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "leave its sandbox"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "leave its sandbox"),
        ("{{ self._TemplateReference__context }}", "leave its sandbox"),
        ("{{ '{0.__class__}'.format(1) }}", "leave its sandbox"),
        ("{{ raise_exception.__globals__ }}", "leave its sandbox"),
        ("{% include '/etc/passwd' %}", "cannot render"),
        ("{% import 'os' as os %}", "cannot render"),
        ("{{ messages.append(1) }}", "leave its sandbox"),
        ("{{ ()|attr('__class__') }}", ""),
    ],
)
def test_templates_that_take_all_or_try_to_leave(monkeypatch, source, why):
    monkeypatch.setattr("jaxrl_post.data.chat_template.RENDER_SECONDS", 2.0)
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"x.jinja: .*{why}"):
        compile_template(source, "x.jinja")([{"role": "user", "content": "a"}])
    assert time.monotonic() - start < 30
    assert compile_template("{{ messages[0].content }}", "y")([{"content": "after"}]) == "after"


def test_the_byte_tokenizer_takes_any_text():
    tokenizer = ByteTokenizer()
    assert tokenizer.render_chat([{"role": "user", "content": "{{ 1 + 1 }}"}]) == "user: {{ 1 + 1 }}\nassistant: "
