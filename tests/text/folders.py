"""Small folders in the form of Hugging Face's: a real vocabulary, and templates like Qwen's and
Nemotron's."""

import json
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from agentjax.adapters.huggingface_text.tokenizer import HuggingFaceTokenizer

_WIDTH, _HEADS, _HEAD_DIM, _LAYERS = 64, 4, 16, 2
_CERTAIN = 12.0  # logit of a token's successor; the other ids' are below 4

# <tool_response> is a control token like the rest, so that no tool's output can end it.
CONTROLS = (
  "<|endoftext|>",
  "<|im_start|>",
  "<|im_end|>",
  "<tool_call>",
  "</tool_call>",
  "<tool_response>",
  "</tool_response>",
  "<think>",
  "</think>",
)
CORPUS = (
  "Tom has 3 apples and buys 4 more. How many apples does he have? #### 7",
  "To sum the numbers, run python and print the result. The answer is 12.",
  '{"name": "python", "arguments": {"code": "print(3 + 4)"}}',
  "for i in range(10):\n  total += i * i\nprint(total)\n",
)

# Tools as JSON lines, tool results grouped into one user turn, thinking dropped before the latest
# question and written empty in the last turn.
JSON_TEMPLATE = """\
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\\n\\n' }}
  {%- endif %}
  {{- 'You may call these functions:\\n<tools>' }}
  {%- for tool in tools %}
    {{- '\\n' }}
    {{- tool | tojson }}
  {%- endfor %}
  {{- '\\n</tools>\\nWrite <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>.' }}
  {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(question=messages | length) %}
{%- for message in messages[::-1] %}
  {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
    {%- set seen.question = messages | length - 1 - loop.index0 %}
    {%- break %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set said = message.content %}
    {%- set thought = '' %}
    {%- if '</think>' in said %}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > seen.question and (loop.last or thought) %}
      {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {% generation %}
      {{- said }}
    {%- endgeneration %}
    {%- for call in message.tool_calls %}
      {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}
      {{- '<|im_start|>user' }}
    {%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}
      {{- '<|im_end|>\\n' }}
    {%- endif %}
  {%- elif message.role != 'system' %}
    {{- raise_exception('no role ' + message.role) }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}
"""

# Tools and calls as XML, contents trimmed, the request for a turn opens the thinking.
XML_TEMPLATE = """\
{%- set thinking = enable_thinking if enable_thinking is defined else true %}
{%- set rest = messages %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
  {%- set rest = messages[1:] %}
  {{- messages[0].content }}
{%- endif %}
{%- for tool in tools or [] %}
  {{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>' }}
  {%- for name, field in tool.function.parameters.properties | items %}
    {{- '\\n<parameter><name>' ~ name ~ '</name><type>' ~ field.type ~ '</type></parameter>' }}
  {%- endfor %}
  {{- '\\n</function>' }}
{%- endfor %}
{%- if tools %}
  {{- '\\nWrite <tool_call>\\n<function=NAME>\\n<parameter=P>\\nVALUE\\n</parameter>\\n' }}
  {{- '</function>\\n</tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in rest %}
  {%- if message.role == 'assistant' %}
    {%- set said = message.content %}
    {%- if '<think>' not in said %}
      {%- set said = '<think></think>' ~ said %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' ~ (said | trim) }}
    {%- for call in message.tool_calls %}
      {{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
      {%- for name, value in call.function.arguments | items %}
        {%- set text = value | tojson if value is mapping or (value is sequence and value is not
          string) else value | string %}
        {{- '<parameter=' ~ name ~ '>\\n' ~ text ~ '\\n</parameter>\\n' }}
      {%- endfor %}
      {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.previtem and loop.previtem.role != 'tool' %}
      {{- '<|im_start|>user\\n' }}
    {%- endif %}
    {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>\\n' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}
      {{- '<|im_end|>\\n' }}
    {%- endif %}
  {%- else %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n<think>' ~ ('\\n' if thinking else '</think>') }}
{%- endif %}
"""


def write_vocabulary(
  directory: pathlib.Path,
  *,
  template: str = JSON_TEMPLATE,
  corpus: tuple[str, ...] = CORPUS,
  vocab_size: int = 330,
  normalizer: str | None = "NFC",
  split: bool = True,
) -> None:
  """tokenizer.json with a byte-level BPE trained here, its settings, a template and stop ids.

  ``split`` False lets merges cross words, so that a whole line of the corpus may be one token.
  """
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  if normalizer == "NFC":
    tokenizer.normalizer = tokenizers.normalizers.NFC()
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=split
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size - len(CONTROLS),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(corpus * 8, trainer)
  # Added behind the vocabulary, thinking and calls not "special": as in Qwen's files.
  tokenizer.add_special_tokens(list(CONTROLS[:3]))
  tokenizer.add_tokens(
    [tokenizers.AddedToken(t, normalized=False, special=False) for t in CONTROLS[3:]]
  )
  tokenizer.save(str(directory / "tokenizer.json"))
  settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
  (directory / "tokenizer_config.json").write_text(json.dumps(settings))
  (directory / "chat_template.jinja").write_text(template)
  stops = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
  (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))


GEMMA_CONTROLS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<think>")
GEMMA_WORDS = (
  "\n",
  "\n\n",
  "\n\n\n",
  "\u2581\u2581",
  "\u2581\u2581\u2581",
  "\t\t",
  "<table>",
  "[@BOS@]",
)
GEMMA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) }}
  {{- '\\n' + message.content + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
{#- thinking stands between <think> and its end -#}
"""


def write_gemma_vocabulary(directory: pathlib.Path) -> None:
  """tokenizer.json in the form of Gemma's: merges over characters, U+2581 for a space, bytes for
  what has no piece, markup and added words (line breaks, spaces, tags) in the vocabulary."""
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
  tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
  tokenizer.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("\u2581", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  pieces = [*GEMMA_CONTROLS, *GEMMA_WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=len(pieces) + 200, special_tokens=pieces, show_progress=False
  )
  tokenizer.train_from_iterator(CORPUS * 8, trainer)
  state = json.loads(tokenizer.to_str())
  state["model"]["byte_fallback"] = True
  plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
  state["added_tokens"] = [
    {"id": i, "content": piece, **plain, "special": piece in GEMMA_CONTROLS[:-1]}
    for i, piece in enumerate(pieces[: len(GEMMA_CONTROLS) + len(GEMMA_WORDS)])
  ]
  (directory / "tokenizer.json").write_text(json.dumps(state))
  settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
  (directory / "tokenizer_config.json").write_text(json.dumps(settings))
  (directory / "chat_template.jinja").write_text(GEMMA_TEMPLATE)
  (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))


def write_model(
  folder: pathlib.Path, tokenizer: HuggingFaceTokenizer, successors: list[tuple[int, int]]
) -> None:
  """A random Qwen3 in transformers' names, whose head makes it say an id's successors, evenly."""
  rng = np.random.default_rng(0)
  vocab = tokenizer.vocab_size + 6  # padded, as published ones are
  values = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": vocab,
    "hidden_size": _WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
  }
  (folder / "config.json").write_text(json.dumps(values))
  embedding = rng.normal(size=(vocab, _WIDTH))
  embedding /= np.sqrt(np.mean(embedding**2, axis=1, keepdims=True))  # as the final norm leaves it
  head = 0.02 * rng.normal(size=(vocab, _WIDTH))
  for token, successor in successors:
    head[successor] += _CERTAIN * embedding[token] / _WIDTH
  tensors = {
    "model.embed_tokens.weight": embedding,
    "model.norm.weight": np.ones(_WIDTH),
    "lm_head.weight": head,
  }
  shapes = {
    "self_attn.q_proj": (_HEADS * _HEAD_DIM, _WIDTH),
    "self_attn.k_proj": (2 * _HEAD_DIM, _WIDTH),
    "self_attn.v_proj": (2 * _HEAD_DIM, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _HEADS * _HEAD_DIM),
    "mlp.gate_proj": (96, _WIDTH),
    "mlp.up_proj": (96, _WIDTH),
    "mlp.down_proj": (_WIDTH, 96),
  }
  for layer in range(_LAYERS):
    at = f"model.layers.{layer}."
    for name, shape in shapes.items():
      tensors[f"{at}{name}.weight"] = 0.05 * rng.normal(size=shape)
    for name in ("input_layernorm", "post_attention_layernorm"):
      tensors[f"{at}{name}.weight"] = np.ones(_WIDTH)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
      tensors[f"{at}{name}.weight"] = np.ones(_HEAD_DIM)
  save_file({k: v.astype(np.float32) for k, v in tensors.items()}, folder / "model.safetensors")
