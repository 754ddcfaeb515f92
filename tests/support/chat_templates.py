"""Chat templates with the peculiarities of well-known families, in few lines of our own.

Rule: what matters is what a template does to the order, the number and the text of messages, not its control tokens.
"""

from __future__ import annotations

_REFUSED = "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}"

ALTERNATING = (
    "{% set ns = namespace(first='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + _REFUSED + "{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ ns.first if loop.first }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
"""Roles must alternate, the system message goes into the first user message (Gemma, Mistral)."""

SYSTEM_ONLY_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
)
"""A system message stands at the beginning or nowhere (Phi, many fine-tunes)."""

HOISTED = (
    "{% for m in messages %}{% if m.role in ['system', 'developer'] %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == 'assistant' %}"
    "Assistant: {{ m.content }}<eos>{% endif %}{% endfor %}Assistant:"
)
"""All instructions are collected at the top, other roles are dropped (DeepSeek, gpt-oss)."""

DROPS_DEVELOPERS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}\n"
    "{% endif %}{% endfor %}<|assistant|>"
)
"""Knows no developer messages and says nothing about it (DeepSeek, MiniMax, RWKV)."""

DEFAULT_SYSTEM = (
    "{% if messages[0].role == 'user' %}<|system|>You are a helpful assistant.<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
)
"""A system message of its own where the conversation begins with none: another beginning changes it (Qwen 2.5)."""

LAST_QUESTION_MATTERS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""What an answer shows depends on whether it stands before the last user message (Qwen 3)."""

TRIMMED_HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
"""Every message the same way, white space cut off (Llama 3)."""

DATED = (
    "<|start|>system<|message|>Knowledge cutoff: 2024-06{% for m in messages %}{% if m.role == 'system' %}"
    "\n{{ m.content }}{% endif %}{% endfor %}<|end|>{% for m in messages %}{% if m.role != 'system' %}<|start|>"
    "{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
"""A preamble of its own, which takes in all instructions (gpt-oss, Command R)."""

TEMPLATES = {
    "alternating": ALTERNATING,
    "system only first": SYSTEM_ONLY_FIRST,
    "hoisted": HOISTED,
    "drops developers": DROPS_DEVELOPERS,
    "default system": DEFAULT_SYSTEM,
    "last question matters": LAST_QUESTION_MATTERS,
    "trimmed headers": TRIMMED_HEADERS,
    "dated": DATED,
}
