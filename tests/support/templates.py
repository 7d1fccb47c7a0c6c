"""Chat templates in the styles that models come with, written with the tiny tokenizer's tokens."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A line break after every turn, and a default system message when the first turn is the user's."""

CHATML_WITH_DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|system|>Be good.<|end|>\n{% endif %}" + CHATML

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n\n' }}"
    "{{ message['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}"
)
"""Writes the beginning-of-text token and trims every content."""

MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}[INST] "
    "{% if loop.last or loop.index0 >= rest | length - 2 %}{{ system }}{% endif %}"
    "{{ message['content'] }} [/INST]{% else %} {{ message['content'] }}<eos>{% endif %}{% endfor %}"
)
"""No roles' tokens and no generation prompt; the system message goes into the last user turn."""

MARKED = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Has generation markers around the answer and its end."""

MARKED_WITHOUT_END = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}=> {{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}"
    "{% endif %}<|end|>{% endfor %}"
)
"""The markers hold text of the template's own, and leave the end-of-turn token out."""

BARE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
"""No special token at all."""

REASONING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '~' in content and not loop.last %}"
    "{% set content = content.split('~')[-1] %}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Leaves the reasoning (up to a tilde) out of every answer but the last."""

TOOLS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}call {{ call['function']['name'] }}"
    "{{ call['function']['arguments'] | tojson }}{% endfor %}{% else %}{{ message['content'] }}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Prints tool calls."""

PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""A line break after the role and after the turn."""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|user|>' + role + '\n' + message['content'] | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>model\n' }}{% endif %}"
)
"""Calls the assistant by another name, trims, and refuses a system message."""

QWEN3 = (
    "{% set last = namespace(query=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|system|>Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|end|>\n{% endif %}"
    "{% for message in messages %}{% set content = message['content'] %}{% set thought = '' %}"
    "{% if message['role'] == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' and loop.index0 > last.query %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' + content }}{% else %}{{ content }}{% endif %}{{ '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Leaves the reasoning out of earlier answers, gives the last one an empty one where it has none, lists tools."""
