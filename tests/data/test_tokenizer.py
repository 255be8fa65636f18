"""Tokenizers: ids, special ids from all files, and chat templates against transformers."""

import pytest
import transformers

from jaxrl_post.data.chat_template import compile_template
from jaxrl_post.data.tokenizer import ByteTokenizer, FolderTokenizer, load_tokenizer

CHATML = """\
{%- if messages[0].role != 'system' -%}
<|im_start|>system\nYou are kind.<|im_end|>\n
{%- endif -%}
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{% endfor %}
    {% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
    {% endif %}
"""
TOOLS = """\
{%- if tools %}
<|im_start|>system
Signatures:
    {%- for tool in tools %}
{{ "\\n" }}{{ tool | tojson }}
    {%- endfor %}
<|im_end|>
{% endif %}
{%- set state = namespace(last=messages|length - 1, asked=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not state.asked %}
        {%- set state.asked = true %}
        {%- set state.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- set text = message.content %}
    {%- if message.role == 'assistant' %}{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
{{- state.last }}
"""
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and message.role != 'system' %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim }}
    {%- if loop.last %}{% break %}{% endif %}
    {{- eos_token }}
{%- endfor %}
{{- date_string }}
{% generation %}
  {{ messages | map(attribute='role') | join(',') }} {{ dict(a=1)['a'] }}
{% endgeneration %}
"""
CHATS = [
    [{"role": "user", "content": "What is 3 + 4?  "}],
    [
        {"role": "user", "content": "<b>it's</b> & é 🎉"},
        {"role": "assistant", "content": "<think>hm</think>\nyes"},
        {"role": "user", "content": "more"},
    ],
]
TOOL = {
    "type": "function",
    "function": {"name": "<add>", "description": 'it\'s é & "so"', "parameters": {"z": 1, "a": []}},
}


@pytest.mark.parametrize("template", [CHATML, TOOLS, HEADERS], ids=["chatml", "tools", "headers"])
@pytest.mark.parametrize("variables", [{}, {"tools": [TOOL], "enable_thinking": False}], ids=["plain", "variables"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_transformers(make_folder, template, variables, add_generation_prompt):
    folder = make_folder({"chat_template": template})
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    for messages in CHATS:
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
        )
        assert tokenizer.render_chat(messages, add_generation_prompt, **variables) == expected
        assert len(expected) > 20
    ids = reference.apply_chat_template(CHATS[1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(CHATS[1]) == ids


def test_encoding_equals_transformers_and_round_trips(make_folder):
    folder = make_folder(adds_bos=True)
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), FolderTokenizer(folder)
    for text in ["", "What is 3 + 4?", "naïve 🎉 \u2028 x", "a<|im_end|>b"]:
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_bos=True) == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b", add_bos=True)) == "ab"
    assert tokenizer.vocab_size == len(reference)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("declared", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_plain_text_begins_as_in_transformers(make_folder, adds_bos, declared):
    folder = make_folder(declared, adds_bos)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("user")["input_ids"]
    tokenizer = FolderTokenizer(folder)
    assert tokenizer.encode("user", add_bos=tokenizer.adds_bos) == ids


def test_truncation_and_padding_of_the_file_are_off(make_folder):
    def shorten(tokenizer):
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=64)

    tokenizer = FolderTokenizer(make_folder(prepare=shorten))
    text = "What is 3 + 4? Answer with just the number. qqqq"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_stop_ids_are_the_union_of_the_three_files(make_folder):
    files = {"generation_config.json": {"eos_token_id": [2, 9]}, "config.json": {"eos_token_id": 2}}
    tokenizer = FolderTokenizer(make_folder({"eos_token": {"content": "<|im_end|>"}}, files=files))
    assert tokenizer.stop_ids == {2, 9, 4}
    assert tokenizer.pad_id == 2
    assert tokenizer.bos_id == 1


@pytest.mark.parametrize(
    ("config", "files", "stop", "pad", "bos"),
    [
        ({"eos_token": None}, {"config.json": {"eos_token_id": "</s>", "bos_token_id": 1}}, {2}, 2, 1),
        ({"bos_token": None}, {"config.json": {"bos_token_id": 1, "pad_token_id": -1}}, {4}, 4, None),
        ({"pad_token": "<pad>"}, {"generation_config.json": {"eos_token_id": ["</s>", 9]}}, {2, 9, 4}, 5, 1),
        ({"eos_token": None}, {"generation_config.json": {"pad_token_id": 5}}, set(), 5, 1),
    ],
)
def test_special_ids(make_folder, config, files, stop, pad, bos):
    tokenizer = FolderTokenizer(make_folder(config, files=files))
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.bos_id) == (stop, pad, bos)


def test_a_folder_without_tokenizer_config_takes_bos_from_the_model(make_folder):
    folder = make_folder(adds_bos=True, files={"config.json": {"bos_token_id": 1, "eos_token_id": 2}})
    (folder / "tokenizer_config.json").unlink()
    tokenizer = FolderTokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.stop_ids) == (1, True, {2})


def test_template_file_goes_first_and_named_templates_use_default(make_folder):
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "named {{ messages[0].content }}"}]
    folder = make_folder({"chat_template": named})
    assert FolderTokenizer(folder).render_chat(CHATS[0]) == "named What is 3 + 4?  "
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert FolderTokenizer(folder).render_chat(CHATS[0]) == "file What is 3 + 4?  "


def test_no_template_names_file_and_key(make_folder):
    tokenizer = FolderTokenizer(make_folder())
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*tokenizer_config\.json.*data\.chat=false"):
        tokenizer.encode_chat(CHATS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages|attr('__class__') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['datetime'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set ns = namespace(_x=1) %}{% set ns.__init__ = 3 %}",
        "{{ range(10 ** 8) | list | length }}",
    ],
)
def test_the_sandbox_holds(source):
    render = compile_template(source, "evil.jinja")
    with pytest.raises(ValueError, match=r"^evil\.jinja: the chat template"):
        render([{"role": "user", "content": "x"}])


def test_template_errors_name_the_file():
    with pytest.raises(ValueError, match=r"a\.jinja: the chat template does not parse"):
        compile_template("{% for %}", "a.jinja")
    with pytest.raises(ValueError, match=r"a\.jinja: .*Roles must alternate"):
        compile_template(HEADERS, "a.jinja")([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, r"tokenizer\.json is not a tokenizer"),
        ({"config.json": "[]"}, r"config\.json holds a list"),
        ({"generation_config.json": "{"}, r"generation_config\.json is not JSON"),
        ({"generation_config.json": {"eos_token_id": ["<none>"]}}, r"generation_config\.json: eos_token_id='<none>'"),
        ({"config.json": {"eos_token_id": 2.5}}, r"config\.json: eos_token_id=2\.5"),
    ],
)
def test_bad_files_are_named(make_folder, files, message):
    folder = make_folder(files=files)
    with pytest.raises(ValueError, match=message):
        FolderTokenizer(folder)


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)


def test_bos_asked_of_a_tokenizer_without_one(make_folder):
    with pytest.raises(ValueError, match="no beginning-of-sequence"):
        FolderTokenizer(make_folder({"bos_token": None})).encode("x", add_bos=True)


def test_byte_tokenizer():
    tokenizer = load_tokenizer(None)
    assert tokenizer.encode("é!", add_bos=True) == [256, 0xC3, 0xA9, 0x21]
    assert tokenizer.decode([256, 0xC3, 0xA9, 0x21, 257, 258, 263]) == "é!"
    assert tokenizer.decode([256, 0x21, 257, 258, 263], skip_special=False) == "<bos>!<eos><pad>"
    assert tokenizer.decode([0x61, 0xC3, 0x62]) == "a\ufffdb"
    assert tokenizer.render_chat(CHATS[0]) == "user: What is 3 + 4?  \nassistant: "
    assert tokenizer.decode(tokenizer.encode_chat(CHATS[1])) == tokenizer.render_chat(CHATS[1])
    assert (tokenizer.bos_id, tokenizer.stop_ids, tokenizer.pad_id, tokenizer.vocab_size) == (256, {257}, 258, 264)
    assert isinstance(tokenizer, ByteTokenizer)
